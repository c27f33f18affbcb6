"""FLOP formulas, registered with torch.utils.flop_counter when it is imported."""
