"""Point-to-point transfer of tensors between ranks."""
