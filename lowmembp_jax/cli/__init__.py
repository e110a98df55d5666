"""Plan the GPU memory of a training step on a machine without a GPU.

lowmembp plan --model vit-b16 --batch 64 --device h200

lowmembp plan --model path/to/config.json --budget 24GB

lowmembp plan --model path/to/file.py:function --budget 24GB --plot plan.png --json plan.json

lowmembp residuals --model vit-b16 --method lowmembp

lowmembp devices

Exit statuses: 0 success, and the step fits; 1 the model's own code failed; 2 an argument is wrong;
3 no method fits; 4 a package is missing; 130 interrupted.
"""

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowmembp_jax._messages import GivenError

_MODEL_FAILED, _USAGE, _MISSING_PACKAGE, _INTERRUPTED = 1, 2, 4, 130
_NEEDED = ("matplotlib", "tyro")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status. Ctrl-C ends the process."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        return _fail(
            f"lowmembp needs {', '.join(missing)}: pip install 'lowmembp_jax[planner]'",
            _MISSING_PACKAGE,
        )
    # Before JAX starts, which sets it to 1. XLA logs "an error in the calculation" for each step
    # that is too large for its device.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import tyro

    from lowmembp_jax.cli import _commands

    commands = {
        "plan": _commands.PlanCommand,
        "residuals": _commands.ResidualsCommand,
        "devices": _commands.DevicesCommand,
    }
    command = tyro.extras.subcommand_cli_from_dict(
        commands, args=arguments, description=__doc__, prog="lowmembp"
    )
    # JAX swallows a KeyboardInterrupt that Python raises inside its callbacks.
    before = signal.signal(signal.SIGINT, _interrupted)
    try:
        # The command needs no GPU, and does not occupy one.
        import jax

        jax.config.update("jax_platforms", "cpu")
        return command.run()
    except SystemExit as error:
        return _fail(f"the model's own code ended the program with {error.code!r}", _MODEL_FAILED)
    except GivenError as error:
        return _fail(str(error), _USAGE)
    except ImportError as error:
        if "pip install 'lowmembp_jax[" not in str(error):
            raise
        return _fail(str(error), _MISSING_PACKAGE)
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupted(*_: Any) -> None:
    """Ends the process. Python would wait for XLA, which cannot be interrupted."""
    _fail("interrupted", _INTERRUPTED)
    for folder in Path(tempfile.gettempdir()).glob(f"lowmembp_jax-{os.getpid()}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(_INTERRUPTED)


def _fail(message: str, status: int) -> int:
    print(f"lowmembp: error: {message}", file=sys.stderr, flush=True)
    return status
