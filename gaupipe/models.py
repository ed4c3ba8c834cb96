"""Vision transformers with the attentions of this project, for timm: the names that users import.

Importing this module registers the ``gauvit_*`` models and the ``gau_*`` attentions with timm.
"""

from gaupipe.vit.convert import convert
from gaupipe.vit.forward import forward_with_maps, run_blocks
from gaupipe.vit.models import GauViT, ReZeroBlock
from gaupipe.vit.saving import STUDENT_FILES, save_student

__all__ = [
    "STUDENT_FILES",
    "GauViT",
    "ReZeroBlock",
    "convert",
    "forward_with_maps",
    "run_blocks",
    "save_student",
]
