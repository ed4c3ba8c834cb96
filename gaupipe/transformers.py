"""Attentions of this project for Hugging Face's transformers: the names that users import.

Importing this module registers ``gau_belief``, ``gau_xsa`` and ``gau_attentionx`` as values of
``attn_implementation``, and the ``gau_*`` language models with ``AutoConfig`` and ``AutoModel``.
"""

from gaupipe.vit.transformers import *  # noqa: F403
from gaupipe.vit.transformers import __all__  # noqa: F401
