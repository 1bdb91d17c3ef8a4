"""Files of a checkpoint directory."""
