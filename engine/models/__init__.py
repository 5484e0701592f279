"""From a checkpoint's files to a decoder that runs passes; the tokenizer and the chat template."""
