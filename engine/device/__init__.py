"""How a round reaches its device: one copy of its numbers, its times, its captured graphs."""
