"""The planner's predictions next to measured steps of this machine."""
