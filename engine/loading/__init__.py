"""What an engine runs on, from checkpoints to runners; and another draft while it serves."""
