"""The planner's predictions beside measured steps of this machine."""
