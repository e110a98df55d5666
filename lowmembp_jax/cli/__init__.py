"""Plan the GPU memory of a training step on a machine without a GPU, and fit step tables for
activations.

lowmembp plan --model vit-b16 --train lora-qv --batch 64 --device h200

lowmembp plan --model path/to/config.json --train lora-all --budget 24GB

lowmembp plan --model path/to/file.py:function --budget 24GB --plot plan.png --json plan.json

lowmembp residuals --model vit-b16 --method lowmembp

lowmembp plan --model vit-b16 --method compress --device all

lowmembp diff before.json after.json

lowmembp devices

lowmembp fit --function jax.nn.mish --bits 4 --plot fit.png

Exit statuses: 0 success, and the step fits; 1 the model's own code failed; 2 an argument is wrong;
3 no method fits; 4 a package is missing; 130 interrupted.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Annotated, NoReturn

from lowmembp_jax._errors import GivenError
from lowmembp_jax.cli._devices import DevicesCommand
from lowmembp_jax.cli._fit import FitCommand
from lowmembp_jax.cli._plan import PlanCommand
from lowmembp_jax.cli._residuals import ResidualsCommand

_MODEL_FAILED, _USAGE, _MISSING_PACKAGE, _INTERRUPTED = 1, 2, 4, 130
_NEEDED = ("matplotlib", "rich", "tyro")

_DELETE = f"""
import contextlib, pathlib, shutil, sys
for pattern in sys.argv[2:]:
    for path in pathlib.Path(sys.argv[1]).glob(pattern):
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
sys.exit({_INTERRUPTED})
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status. Ctrl-C ends the process."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        return _fail(
            f"lowmembp needs {', '.join(missing)}: pip install 'lowmembp_jax[planner]'",
            _MISSING_PACKAGE,
        )
    import tyro

    from lowmembp_jax.cli._diff import DiffCommand

    commands = Annotated[
        Annotated[PlanCommand, tyro.conf.subcommand("plan")]
        | Annotated[ResidualsCommand, tyro.conf.subcommand("residuals")]
        | Annotated[DiffCommand, tyro.conf.subcommand("diff")]
        | Annotated[DevicesCommand, tyro.conf.subcommand("devices")]
        | Annotated[FitCommand, tyro.conf.subcommand("fit")],
        tyro.conf.OmitSubcommandPrefixes,
    ]
    command = tyro.cli(commands, args=arguments, description=__doc__, prog="lowmembp")  # pyright: ignore[reportCallIssue, reportArgumentType]
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
        if "lowmembp_jax[planner]" not in str(error):
            raise
        return _fail(str(error), _MISSING_PACKAGE)
    except KeyboardInterrupt:
        _interrupted()


def _fail(message: str, status: int) -> int:
    print(f"lowmembp: error: {message}", file=sys.stderr)
    return status


def _interrupted() -> NoReturn:
    """Replaces the process by one that deletes XLA's files and exits with status 130.

    Python would wait until XLA has compiled, and XLA's threads would write deleted files again:
    they end only when the process is replaced.
    """
    _fail("interrupted", _INTERRUPTED)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.getpid()
    patterns = (f"lowmembp_jax-{pid}-*", f"tempfile-*-{pid}-*")
    arguments = ("-I", "-S", "-c", _DELETE, tempfile.gettempdir(), *patterns)
    os.execv(sys.executable, (sys.executable, *arguments))
