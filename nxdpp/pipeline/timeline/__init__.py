"""Recording of steps and their timeline file."""
