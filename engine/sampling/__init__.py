"""From logits to the law, to draws and to accepted drafts."""
