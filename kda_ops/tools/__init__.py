"""The commands that a user runs besides `doctor`, and what commands share."""
