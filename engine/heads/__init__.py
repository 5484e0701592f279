"""Small models that draft from the target's hidden states."""
