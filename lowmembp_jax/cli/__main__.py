"""`python -m lowmembp_jax.cli`, which is the `lowmembp` command."""

import sys

from lowmembp_jax.cli import main

sys.exit(main())
