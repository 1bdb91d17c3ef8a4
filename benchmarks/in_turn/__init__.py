"""Steps of several jobs, one step of each in turn."""
