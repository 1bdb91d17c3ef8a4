"""From an ``nn.Module`` to one fx graph in which transformer layers are single nodes."""
