"""`lm.patch`: use this library's operators in a model that you cannot edit."""

from lowmembp_jax.patching._checkpoints import compress_checkpoints as compress_checkpoints
from lowmembp_jax.patching._patch import patch as patch
from lowmembp_jax.patching._report import PatchReport as PatchReport
