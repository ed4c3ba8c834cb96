"""Vision transformers of timm with the attentions of this project: built, converted, run, saved."""
