"""Naranhi: distributed training, written small and run on real ranks."""
