"""Write the package as a kernel of the Hugging Face hub: ``python -m benchmarks hub --out FOLDER``.

The result is ``FOLDER/build/torch-cuda/``, which `kernels.get_kernel` loads. It holds
``metadata.json``, and in ``kda_ops/`` the modules that the layers of `kda_ops.compat.hub_layers`
need. The format requires two changes:

- Imports are relative, because the package gets another name, and several versions may be loaded.
- Operators get namespaces of their own, ``<id>_kda`` and ``<id>_gdn`` instead of ``kda`` and
  ``gdn``. The id contains a digest of the sources, so versions do not collide.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import shutil
from pathlib import Path

import kda_ops
from kda_ops import registrations

PACKAGE = "kda_ops"
_ROOTS = (
    f"{PACKAGE}.functional",
    f"{PACKAGE}.layer_functional",
    f"{PACKAGE}.cuts",
    f"{PACKAGE}.compat.hub_layers",
    f"{PACKAGE}.backends.native",
    f"{PACKAGE}.backends.triton",
    f"{PACKAGE}.registrations",
)
_INIT = '''"""Kimi Delta Attention (KDA) and Gated DeltaNet (GDN) as a kernel of the hub.

`layers` holds the replacements of transformers' functions. The operators are `chunk_kda`,
`recurrent_kda`, `chunk_gdn` and `recurrent_gdn`; version {version} of kda-ops.
"""

from . import registrations
from .compat import hub_layers as layers
{functions}

__version__ = "{version}"
__all__ = ["layers", {names}]
'''
_OPS = '''"""The unique names of this build's operators."""

import torch

KDA, GDN = "{namespace}_kda", "{namespace}_gdn"
ops = {{"kda": getattr(torch.ops, KDA), "gdn": getattr(torch.ops, GDN)}}


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the full name of an operator: ``kda::chunk`` becomes ``<id>_kda::chunk``."""
    return f"{namespace}_{{op_name}}"
'''


def _file(module: str) -> Path | None:
    """Return the source file of a module of the package, or None.

    A checkout keeps the package in two folders, an installation in one.
    """
    parts = module.split(".")[1:]
    base = Path(kda_ops.__file__).parent
    if parts[:1] == ["registrations"]:
        base, parts = Path(registrations.__file__).parent, parts[1:]
    path = base.joinpath(*parts)
    for candidate in (path / "__init__.py", path.with_suffix(".py")):
        if candidate.is_file() and (parts or candidate.name == "__init__.py"):
            return candidate
    return None


def _is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imports(tree: ast.AST) -> set[str]:
    """Return the modules of the package that a module imports, but not those for typing alone."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        if isinstance(node, ast.Import):
            wrong = [a.name for a in node.names if a.name.split(".")[0] == PACKAGE]
            if wrong:
                raise ValueError(
                    f"a hub kernel has relative imports alone, got `import {wrong[0]}`: write "
                    "`from ... import`."
                )
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = getattr(node.args[0], "value", None)
            found |= {name} if isinstance(name, str) and name.startswith(f"{PACKAGE}.") else set()
        if not _is_typing_only(node):
            found |= _imports(node)
    return found


def sources() -> dict[str, Path]:
    """Return the modules that a hub kernel needs and their files, by name."""
    found: dict[str, Path] = {}
    ahead = list(_ROOTS)
    while ahead:
        module = ahead.pop()
        path = _file(module)
        if path is None or module in found or module in (PACKAGE, f"{PACKAGE}._checkout"):
            continue
        found[module] = path
        ahead += _imports(ast.parse(path.read_text()))
        parent = module.rpartition(".")[0]
        ahead += [parent] if parent else []
    lost = [root for root in _ROOTS if root not in found]
    if lost:
        raise FileNotFoundError(f"the package has no module {', '.join(lost)}: correct _ROOTS.")
    return dict(sorted(found.items()))


def rewrite(module: str, source: str, is_package: bool, namespace: str) -> str:
    """Return a module's source with relative imports and the operators' names of this build."""
    depth = module.count(".") + is_package  # packages between the module and the root, and the root
    edits: list[tuple[ast.AST, str]] = []

    def relative(name: str) -> str:
        return "." * depth + name.removeprefix(PACKAGE).removeprefix(".")

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            assert node.module is not None
            names = ", ".join(ast.unparse(a) for a in node.names)
            edits.append((node, f"from {relative(node.module)} import {names}"))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            text = ast.unparse(node.args[0])
            if PACKAGE + "." in text:
                name = text.replace(f"{PACKAGE}.", "." * depth)
                edits.append((node, f"{ast.unparse(node.func)}({name}, __package__)"))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in (
            "torch.ops.kda",
            "torch.ops.gdn",
        ):
            edits.append((node, f"torch.ops.{namespace}_{node.attr}"))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "(KDA, GDN)":
            edits.append((node, f"from {relative(f'{PACKAGE}._ops')} import GDN, KDA"))
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for node, text in sorted(edits, key=lambda e: (e[0].lineno, e[0].col_offset), reverse=True):  # type: ignore[attr-defined]
        first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
        head = lines[first][: node.col_offset]  # type: ignore[attr-defined]
        tail = lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
        lines[first : last + 1] = [head + text.encode() + tail]
    return b"".join(lines).decode()


def write(folder: Path) -> Path:
    """Write the kernel below `folder`, replacing an older one; return the build's folder."""
    modules = sources()
    texts = {module: path.read_text() for module, path in modules.items()}
    content = json.dumps([kda_ops.__version__, _INIT, _OPS, texts], sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:10]
    namespace = f"_{PACKAGE}_cuda_{digest}"
    build = folder / "build" / "torch-cuda"
    root = build / PACKAGE
    if build.exists():
        shutil.rmtree(build)
    root.mkdir(parents=True)
    for module, text in texts.items():
        is_package = modules[module].name == "__init__.py"
        place = root.joinpath(*module.split(".")[1:])
        place = place / "__init__.py" if is_package else place.with_suffix(".py")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(rewrite(module, text, is_package, namespace))
    functions = [n for n in kda_ops.__all__ if n != "SAVE_OPS"]
    names = ", ".join(f'"{n}"' for n in functions)
    imports = "\n".join(
        f"from .{getattr(kda_ops, n).__module__.removeprefix(f'{PACKAGE}.')} import {n}"
        for n in functions
    )
    init = _INIT.format(version=kda_ops.__version__, functions=imports, names=names)
    (root / "__init__.py").write_text(init)
    (root / "_ops.py").write_text(_OPS.format(namespace=namespace))
    metadata = {
        "id": namespace,
        "name": "kda-ops",
        "version": int(kda_ops.__version__.split(".")[0]),
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda"},
    }
    (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return build


def main(argv: list[str]) -> int:
    """Write the kernel and print where."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks hub", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the kernel repository's folder")
    build = write(parser.parse_args(argv).out)
    print(f"{build}: {sum(1 for _ in build.rglob('*.py'))} modules")
    return 0
