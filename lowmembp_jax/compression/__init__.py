"""`lm.compress`: stores the residuals of any function in 8 bits."""

from lowmembp_jax.compression._checkpointed import StorageFormat as StorageFormat
from lowmembp_jax.compression._checkpointed import check_options as check_options
from lowmembp_jax.compression._checkpointed import compress as compress
from lowmembp_jax.compression._checkpointed import in_range as in_range
from lowmembp_jax.compression._checkpointed import positions as positions
from lowmembp_jax.compression._checkpointed import stored as stored
