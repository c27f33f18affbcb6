"""Limit stack, instructions and registers of the kernels that a layer uses, on sm_90.

``python -m kda_ops compile`` compares each kernel of a layer's configurations with its budget. A
budget belongs to a kernel (`offline.Row.name`) and a gate, and holds for all of its variants.
"""

# the versions of Triton that have budgets of their own
TRITONS: tuple[tuple[int, ...], ...] = ((3, 6), (3, 7), (3, 8), (3, 9))
# A kernel may have at most MARGIN times the instructions that the best of these versions needs.
MARGIN = 1.1
# (kernel, gate) -> bytes of stack per thread for each version, and the fewest instructions of all
# versions, or None. Four equal numbers are the largest of the four versions.
BUDGETS: dict[tuple[str, str], tuple[tuple[int, ...], int | None]] = {
    ("prepare_kda", "bound"): ((32, 56, 64, 112), 4304),
    ("prepare_kda", "softplus"): ((40, 208, 72, 264), 5728),
    ("prepare_kda", "promised"): ((0, 56, 56, 64), 3488),
    ("scan_kda", "bound"): ((104, 104, 104, 104), None),
    ("scan_kda", "softplus"): ((80, 80, 80, 80), None),
    ("reverse_scan_kda", "bound"): ((0, 0, 0, 0), None),
    ("reverse_scan_kda", "softplus"): ((0, 0, 0, 0), None),
    ("reverse_scan_kda", "promised"): ((0, 0, 0, 0), None),
    ("gradient_pairs", "bound"): ((120, 120, 120, 120), None),
    ("gradient_pairs", "softplus"): ((120, 120, 120, 120), None),
    ("gradient_pairs", "promised"): ((0, 0, 0, 0), None),
    ("gradient_small", "promised"): ((0, 0, 0, 0), None),
    ("gradient_keys", "bound"): ((280, 320, 272, 256), None),
    ("gradient_keys", "softplus"): ((280, 320, 272, 256), None),
    ("gradient_keys", "promised"): ((352, 352, 352, 352), None),
    ("sum_decays", "bound"): ((0, 0, 0, 0), None),
    ("sum_decays", "softplus"): ((0, 0, 0, 0), None),
    ("sum_gradients", "bound"): ((0, 0, 0, 0), None),
    ("sum_gradients", "softplus"): ((0, 0, 0, 0), None),
    ("reverse_scan_gdn", "bound"): ((8, 8, 8, 8), None),
    ("reverse_scan_gdn", "softplus"): ((8, 8, 8, 8), None),
    ("gradient_gdn", "bound"): ((1392, 1320, 1240, 1464), 6320),
    ("gradient_gdn", "softplus"): ((1392, 1320, 1240, 1464), 6240),
    ("reverse_walk_gdn", "bound"): ((0, 0, 0, 8), 2984),
    ("reverse_walk_gdn", "softplus"): ((0, 8, 8, 8), 3056),
    ("reverse_walk_gdn", "plain"): ((0, 0, 0, 8), 2960),
    ("finish_walk", "bound"): ((0, 0, 0, 0), None),
    ("finish_walk", "softplus"): ((0, 0, 0, 0), None),
    ("finish_walk", "plain"): ((0, 0, 0, 0), None),
    ("gather_heads", "bound"): ((0, 0, 0, 0), None),
    ("gather_heads", "softplus"): ((0, 0, 0, 0), None),
    ("prepare_gdn", "bound"): ((96, 112, 104, 152), None),
    ("prepare_gdn", "softplus"): ((88, 112, 112, 144), None),
    ("prepare_gdn", "promised"): ((96, 80, 80, 144), None),
    ("scan_gdn", "bound"): ((8, 8, 8, 8), None),
    ("scan_gdn", "softplus"): ((0, 0, 0, 0), None),
    ("recur", "bound"): ((0, 0, 0, 0), None),
    ("join_runs", "bound"): ((0, 0, 0, 0), None),
    ("scan_kda.few", "bound"): ((136, 136, 136, 272), None),
    ("scan_gdn.few", "bound"): ((0, 8, 0, 104), None),
    ("reverse_scan_kda.few", "bound"): ((0, 8, 8, 24), None),
    ("reverse_scan_gdn.few", "bound"): ((32, 24, 16, 112), None),
    # With 226 KB of shared memory, L1 cannot hold 100 B of stack per thread: 1.5 times as slow.
    ("scan_kda.ahead", "bound"): ((0, 0, 0, 0), None),
    ("scan_gdn.ahead", "bound"): ((0, 0, 0, 0), None),
    ("gate_forward", "bound"): ((0, 0, 0, 0), None),
    ("gate_forward", "softplus"): ((0, 0, 0, 0), None),
    ("gate_gradient", "bound"): ((0, 0, 0, 0), None),
    ("gate_gradient", "softplus"): ((8, 0, 0, 0), None),  # 3.6: one register short for its mask
    ("gradient_gdn.single", "bound"): ((248, 256, 224, 408), 4200),
    ("convolve", "silu"): ((0, 0, 0, 0), None),
    ("convolve_gradient", "silu"): ((80, 80, 80, 80), None),
    ("write_tails", "silu"): ((0, 0, 0, 0), None),
    ("tail_gradient", "silu"): ((0, 0, 0, 0), None),
    ("normalise", "sigmoid"): ((0, 0, 0, 0), None),
    ("normalise", "silu"): ((0, 0, 0, 0), None),
    ("normalise_gradient", "sigmoid"): ((0, 0, 0, 0), None),
    ("normalise_gradient", "silu"): ((8, 8, 8, 8), None),
}
# The most registers per thread, if not 255, so that more programs run at once.
REGISTERS = {
    "prepare_gdn": 168,
    "gradient_pairs": 168,
    "gradient_small": 168,
    "recur": 168,
    "finish_walk": 128,
    "sum_decays": 64,
    "sum_gradients": 64,
    "gather_heads": 64,
    "gate_forward": 128,
    "gate_gradient": 168,
    "convolve": 128,
    "convolve_gradient": 128,
    "write_tails": 64,
    "tail_gradient": 128,
    "normalise": 128,
}


def faults(
    name: str, gate: str, registers: int, stack: int, instructions: int, triton: tuple[int, ...]
) -> list[str]:
    """List what of a kernel exceeds its budget with this version of Triton.

    A version without a budget of its own has the largest of the four.
    """
    found = []
    stacks, fewest = BUDGETS.get((name, gate), (None, None))
    if stacks is not None:
        known = triton[:2] in TRITONS
        budget = stacks[TRITONS.index(triton[:2])] if known else max(stacks)
        if stack > budget:
            found.append(f"{stack} bytes of stack, the budget is {budget}")
    if fewest is not None and instructions > MARGIN * fewest:
        found.append(
            f"{instructions} instructions, the best version of triton takes {fewest}: the budget "
            f"is {MARGIN} times as many"
        )
    if registers > (most := REGISTERS.get(name, 255)):
        found.append(f"{registers} registers, the budget is {most}: fewer programs run at once")
    return found
