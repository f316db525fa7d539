"""Imported once by the process that ranks are forked from: what every rank would import for itself otherwise."""

import transformers.models.deepseek_v32.modeling_deepseek_v32
import transformers.models.glm_moe_dsa.modeling_glm_moe_dsa

__all__ = ["transformers"]
