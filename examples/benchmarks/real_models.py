"""Models on real data, small enough to measure gradients and their errors on a CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from lowmembp_examples.data.batches import TrainingBatches
from lowmembp_examples.data.minilm import minilm_directory
from lowmembp_examples.data.tasks import DataConfig, Task, load_task
from lowmembp_examples.finetune import MINILM
from lowmembp_examples.lora import Train, add_lora, apply_lora, partition
from lowmembp_examples.trainer.losses import make_loss
from lowmembp_examples.trainer.source import (
    Source,
    find_source,
    fit,
    initial_params,
    model_inputs,
)
from lowmembp_examples.trainer.step import (
    LossFn,
    OptimizerConfig,
    init_state,
    make_optimizer,
    make_step,
)

from lowmembp_jax.models.layers import Compute

Name = Literal["minilm", "vit", "swin", "llama"]
IMAGE = 32


class RealModel(NamedTuple):
    """A model, its initial parameters, and its batches.

    Attributes:
      source: family and sizes.
      params: the trained parameters, pretrained or drawn at random.
      batches: the training batches.
      task: the training data and the held-out data.
      frozen: the other parameters.
      train: which parameters are trained, see `lora.partition`.
    """

    source: Source
    params: Any
    batches: TrainingBatches
    task: Task
    frozen: Any
    train: Train

    def build(self, compute: Compute) -> Any:
        return apply_lora(self.source.family.build(self.source.config, compute), self.train)

    def loss(self, compute: Compute) -> LossFn:
        return make_loss(self.source.family.task, self.build(compute))

    def run(self, compute: Compute, steps: int, rate: float = 2e-4) -> Iterator[tuple[Any, Any]]:
        """Trains with AdamW from the initial parameters; yields state and metrics of each step."""
        optimizer = make_optimizer(OptimizerConfig(rate), steps)
        step = jax.jit(make_step(self.loss(compute), optimizer))
        state = init_state(self.params, optimizer, "float32")
        for number in range(steps):
            state, metrics = step(state, self.frozen, self.batches.at(number))
            yield state, metrics


def load(
    name: Name,
    batch_size: int = 32,
    tokens: int = 48,
    checkpoint: Path | None = None,
    data: Path | None = None,
    dev: Path | None = None,
    seed: int = 0,
    train: Train = "full",
) -> RealModel:
    """Loads a model and its data.

    Args:
      name: "minilm", the pretrained BERT of 6 layers, on docstrings of Python's standard library;
        "vit" and "swin", with 4 layers, on digits; "llama", with 4 layers, on the standard
        library's source text.
      batch_size: examples per batch.
      tokens: tokens per text.
      checkpoint: directory of a BERT to use instead of MiniLM: config.json, model.safetensors,
        tokenizer.json.
      data: your own data set, `DataConfig.train`.
      dev: your own data to evaluate on, `DataConfig.dev`.
      seed: seed of the random parameters and of the order of the examples.
      train: which parameters to train.
    """
    if name == "minilm":
        directory = checkpoint or minilm_directory()
        source = find_source(None, directory, "text-classification", new_head=True)
        source, tokenizer = source._replace(family=MINILM), directory / "tokenizer.json"
    else:
        source, tokenizer = find_source(f"{name}-toy", None, None), None
    task_name = source.family.task
    task = load_task(
        DataConfig(
            task_name, data, dev, tokenizer=tokenizer, sequence_length=tokens, image_size=IMAGE
        )
    )
    source = source._replace(config=fit(source, task, tokens, IMAGE))
    inputs, key = model_inputs(task_name, tokens, IMAGE), jax.random.key(seed)
    params = initial_params(source, source.config, inputs, key)
    batches = TrainingBatches(task.train, batch_size, seed)
    model = RealModel(source, params, batches, task, {}, train)
    if train == "full":
        return model
    params = add_lora(model.build(Compute()), params, jax.random.fold_in(key, 1), *inputs)
    trained, frozen = partition(params, train)
    return model._replace(params=trained, frozen=frozen)
