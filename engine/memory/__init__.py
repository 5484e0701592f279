"""How much memory an engine needs, and how much there is."""
