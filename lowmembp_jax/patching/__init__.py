"""The operators of this library inside a model that somebody else wrote."""

from lowmembp_jax.patching._patch import patch as patch
from lowmembp_jax.patching._report import PatchReport as PatchReport
