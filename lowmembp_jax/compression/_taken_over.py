"""`lm.compress_checkpoints`: each `jax.checkpoint` of a function stores its residuals in 8 bits.

The function is traced first, and each outermost checkpoint in its jaxpr becomes the primitive
`compress` with the checkpoint's own policy. There it is known which operands depend on data, so
nobody must name the parameters of each checkpoint.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable
from jax.extend import core
from jax.extend.core.primitives import remat_p

from lowmembp_jax._jax_internals import is_reference, weakref_lru_cache
from lowmembp_jax._messages import frames_of, is_framework, users_line
from lowmembp_jax._sizes import format_bytes
from lowmembp_jax.compression import jaxprs
from lowmembp_jax.compression._marks import Marker
from lowmembp_jax.compression._primitive import How, Input, Saved, compress_p

PARAMETER, KEPT, ACTIVATION = Input


@dataclass(frozen=True)
class Checkpoint:
    """A `jax.checkpoint` of a differentiated function.

    Attributes:
      function: the name of the function, or "checkpoint" for a function of a framework.
      line: the user's line that defines the function or calls it, as "file:line".
      policy: the name of its policy.
      times: how often it runs: the product of the lengths of the scans around it.
      saved: the bytes that one run saves; None if the checkpoint is left for the reason `left`.
      left: the reason, or "".
      scans: whether the function runs a `lax.scan` without checkpoints in it.
      like: is the same for calls that are differentiated alike.
    """

    function: str
    line: str
    policy: str
    times: int = 1
    saved: Saved | None = field(default=None, compare=False)
    left: str = ""
    scans: bool = False
    like: How | None = field(default=None, repr=False)

    def __str__(self) -> str:
        before, after = (self.saved.before, self.saved.after) if self.saved else (None, None)
        if self.left:
            result = f"left alone: {self.left}"
        elif before is None or after is None:
            result = "not differentiated"
        elif not before:
            result = "left alone: it saves nothing but its arguments"
        elif after >= before:
            result = (
                f"left alone: it saves {format_bytes(before * self.times)}, and would save "
                f"{format_bytes(after * self.times)}"
            )
            result += "; checkpoint the body of its scan instead" if self.scans else ""
        else:
            result = f"{format_bytes(before * self.times)} -> {format_bytes(after * self.times)}"
        name = f"{self.function} at {self.line}" if self.line else self.function
        return f"{name}, {self.policy}: {result}" if self.policy else f"{name}: {result}"


def grouped(checkpoints: Iterable[Checkpoint]) -> list[str]:
    """A line of text for each group of equal checkpoints."""
    counts = collections.Counter(map(str, checkpoints))
    return [text if count == 1 else f"{count} x {text}" for text, count in counts.items()]


class Settings(NamedTuple):
    """How to take checkpoints over.

    Attributes:
      formats: the items of the formats by `checkpoint_name`.
      policy: replaces the checkpoints' own policies, or None.
      owner: the name in errors.
      is_for_tpu: whether the program is for a TPU, because it is in the keys of caches.
    """

    formats: tuple[tuple[str | None, str | None], ...]
    policy: Callable[..., Any] | None
    owner: str
    is_for_tpu: bool


class Rewritten(NamedTuple):
    """A jaxpr whose checkpoints are taken over.

    Attributes:
      jaxpr: the jaxpr, or None if it stays as it is.
      results: what its results are.
      found: its checkpoints.
    """

    jaxpr: core.Jaxpr | None
    results: tuple[Input, ...]
    found: tuple[Checkpoint, ...]


@weakref_lru_cache
def take_over(jaxpr: core.Jaxpr, inputs: tuple[Input, ...], settings: Settings) -> Rewritten:
    """Replaces the outermost checkpoints of a jaxpr, whose inputs are `inputs`."""
    jaxpr = _with_passed_on(jaxpr)
    flow = dict(zip(jaxpr.invars, inputs, strict=True)) | dict.fromkeys(jaxpr.constvars, KEPT)
    readers, new, found = _readers(jaxpr), [], []

    def read(atom):
        if isinstance(atom, core.Literal):
            return PARAMETER
        if flow[atom] is ACTIVATION and _is_shared(atom.aval, readers[atom]):
            return KEPT
        return flow[atom]

    for eqn in jaxpr.eqns:
        given = tuple(map(read, eqn.invars))
        results = (_of_any(given),) * len(eqn.outvars)
        if _is_checkpoint(eqn):
            results = take_over(eqn.params["jaxpr"], given, settings).results
            eqn, one = _taken(eqn, given, settings)
            found.append(one)
        elif eqn.primitive is remat_p:
            # Its derivative is a part of the function, whose own derivative is the second one.
            found.append(_described(eqn, "the function differentiates it itself"))
        elif eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call"):
            # Its derivative belongs to the function itself.
            inside = [e for body in jaxprs.bodies(eqn) for e in jaxprs.every_equation(body)]
            why = "inside a function with a derivative of its own"
            found += [_described(e, why) for e in inside if _is_checkpoint(e)]
        elif bodies := jaxprs.bodies(eqn):
            bodies, results, own = _in_bodies(eqn, bodies, given, settings)
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            line = users_line(frames_of(eqn))
            found += [
                dataclasses.replace(one, times=one.times * times, line=one.line or line)
                for one in own
            ]
            if bodies is not None:
                eqn = jaxprs.with_bodies(eqn, bodies)
        flow.update(zip(eqn.outvars, results, strict=True))
        new.append(eqn)
    is_same = all(a is b for a, b in zip(new, jaxpr.eqns, strict=True))
    results = tuple(PARAMETER if isinstance(a, core.Literal) else flow[a] for a in jaxpr.outvars)
    return Rewritten(None if is_same else jaxpr.replace(eqns=new), results, tuple(found))


def _with_passed_on(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Reads what a checkpoint only passes on, such as its parameters, where it comes from."""
    source, new = {}, []
    for eqn in jaxpr.eqns:
        read = [source.get(a, a) if isinstance(a, core.Var) else a for a in eqn.invars]
        eqn = eqn.replace(invars=read)
        if _is_checkpoint(eqn):
            body = eqn.params["jaxpr"]
            given = dict(zip(body.invars, read, strict=True))
            pairs = zip(eqn.outvars, body.outvars, strict=True)
            source |= {v: given[a] for v, a in pairs if isinstance(a, core.Var) and a in given}
        new.append(eqn)
    return jaxpr.replace(eqns=new) if source else jaxpr


def _of_any(given: Sequence[Input]) -> Input:
    return PARAMETER if all(one is PARAMETER for one in given) else ACTIVATION


def _is_checkpoint(eqn: core.JaxprEqn) -> bool:
    """Whether an equation is a checkpoint that was not differentiated before."""
    return eqn.primitive is remat_p and not eqn.params["differentiated"]


def _in_bodies(eqn, bodies, given, settings):
    """Takes the checkpoints in the bodies of an equation over.

    Returns the new bodies, or None if they stay as they are, what the equation's results are, and
    the checkpoints.
    """
    operands = given[1:] if eqn.primitive.name == "cond" else given
    back = jaxprs.carried(eqn, bodies[0])
    # A step of a scan makes what the next one reads.
    operands = [
        one if out is None or one is PARAMETER else ACTIVATION
        for one, out in zip(operands, back, strict=True)
    ]
    while True:
        each = [take_over(body, tuple(operands), settings) for body in bodies]
        results = [_of_any(ones) for ones in zip(*(one.results for one in each), strict=True)]
        after = [
            one if out is None else _of_any([one, results[out]])
            for one, out in zip(operands, back, strict=True)
        ]
        if after == operands:
            break
        operands = after
    if eqn.primitive.name == "cond" and given[0] is not PARAMETER:
        results = [ACTIVATION] * len(results)
    found = [checkpoint for one in each for checkpoint in one.found]
    if all(one.jaxpr is None for one in each):
        return None, results, found
    pairs = zip(each, bodies, strict=True)
    return [body if one.jaxpr is None else one.jaxpr for one, body in pairs], results, found


@weakref_lru_cache
def _readers(jaxpr: core.Jaxpr) -> collections.Counter:
    """Counts the runs of checkpoints that read each variable."""
    counts = collections.Counter()
    for eqn in jaxpr.eqns:
        if _is_checkpoint(eqn):
            counts.update(jaxprs.variables(eqn))
            continue
        bodies = jaxprs.bodies(eqn)
        for body in bodies:
            inside, back = _readers(body), jaxprs.carried(eqn, body)
            for atom, var, out in zip(jaxprs.operands(eqn), body.invars, back, strict=True):
                is_whole = out is None and atom.aval == var.aval
                length = eqn.params["length"] if eqn.primitive.name == "scan" and is_whole else 1
                if isinstance(atom, core.Var) and inside[var]:
                    counts[atom] += inside[var] * length
    return counts


def _is_shared(aval: Any, readers: int) -> bool:
    """Whether one array takes no more memory than its copies in 8 bits, one for each reader."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return 8 * readers >= jnp.finfo(dtype).bits


def _taken(
    eqn: core.JaxprEqn, given: tuple[Input, ...], settings: Settings
) -> tuple[core.JaxprEqn, Checkpoint]:
    """Takes one checkpoint over, or leaves it."""
    if all(one is PARAMETER for one in given):
        return eqn, _described(eqn, "all that it reads is computed from parameters alone")
    jaxpr, policy = eqn.params["jaxpr"], settings.policy or _policy(eqn)
    every = [eqn, *jaxprs.every_equation(jaxpr)]
    atoms = [atom for e in every for atom in (*e.invars, *e.outvars)]
    if any(map(is_reference, atoms)):
        return eqn, _described(eqn, "it has mutable arrays")
    if not all(hasattr(atom.aval, "dtype") for atom in atoms):
        return eqn, _described(eqn, "it has values that are not arrays")
    if jaxprs.has_symbolic_sizes(jaxpr):
        return eqn, _described(eqn, "its sizes are symbolic, so its bytes are not known")
    if any(_offloads_elsewhere(policy, each) for each in every):
        return eqn, _described(eqn, "its policy offloads to another memory than pinned_host")
    prevent_cse = eqn.params["prevent_cse"]
    prevent_cse = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
    like = _how(jaxpr, given, policy, prevent_cse, settings)
    how = dataclasses.replace(like, saved=Saved(), like=like, others={})
    new = eqn.replace(primitive=compress_p, params={"jaxpr": jaxpr, "how": how})
    return new, dataclasses.replace(_described(eqn), saved=how.saved, like=like)


def _described(eqn: core.JaxprEqn, left: str = "") -> Checkpoint:
    jaxpr, policy = eqn.params["jaxpr"], _policy(eqn)
    name, _, place = jaxpr.debug_info.func_src_info.partition(" at ")
    file, _, line = place.rpartition(":")
    defined = [(file, int(line))] if line.isdigit() else []
    if is_framework(file):
        name = "checkpoint"  # a function of Flax that calls the module
    return Checkpoint(
        name,
        users_line([*defined, *frames_of(eqn)]),
        _name(policy),
        left=left,
        scans=any(
            each.primitive.name == "scan" and not any(_readers(jaxprs.bodies(each)[0]).values())
            for each in jaxpr.eqns
        ),
    )


def _name(policy: Callable[..., Any]) -> str:
    for name, known in vars(jax.checkpoint_policies).items():
        if known is policy:
            return name
    if type(policy).__repr__ is not object.__repr__ and not hasattr(policy, "__qualname__"):
        return repr(policy)  # an instance of a class, with its arguments
    return getattr(policy, "__qualname__", type(policy).__name__).partition(".<locals>")[0]


def _policy(eqn: core.JaxprEqn) -> Callable[..., Any]:
    return eqn.params["policy"] or jax.checkpoint_policies.nothing_saveable


def _offloads_elsewhere(policy: Callable[..., Any], eqn: core.JaxprEqn) -> bool:
    answer = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    places = ("device", "pinned_host")
    return isinstance(answer, Offloadable) and (answer.src, answer.dst) != places


@weakref_lru_cache
def _how(
    jaxpr: core.Jaxpr,
    inputs: tuple[Input, ...],
    policy: Callable[..., Any],
    prevent_cse: bool,
    settings: Settings,
) -> How:
    marker = Marker(policy, dict(settings.formats), settings.owner)
    return How(marker, inputs, prevent_cse)
