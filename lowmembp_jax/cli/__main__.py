"""Runs the `lowmembp` command as `python -m lowmembp_jax.cli`."""

import sys

from lowmembp_jax.cli import main

sys.exit(main())
