"""The torch ops of the package: `torch.ops.nmm.*`, and what they share. See registration.py."""
