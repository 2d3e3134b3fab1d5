"""The trainer: fp32 master weights, a recipe's low-precision GEMMs, and a run that resumes bit for bit.

One optimizer step is `accumulate` micro-batches, whose position in the data is the step's number alone; the loss is the
mean over all tokens of the step. Nothing but weights, optimizer state, generators, the rounding clock and the step
number decides what comes next, and a checkpoint holds exactly these.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quatrain import checkpoint
from quatrain.files import expand
from quatrain.nn import NonFiniteError, check_finite, realign_cost, rng_state, set_rng_state
from quatrain.optim.state import state_bytes
from quatrain.recipe import Recipe, load_recipe, set_precision
from quatrain.train import records
from quatrain.train.config import RunConfig, replace_in
from quatrain.train.interrupts import watch
from quatrain.train.optimizer import describe_optimizer, make_optimizer, optimizer_rows
from quatrain.train.parts import assemble
from quatrain.train.process import settings
from quatrain.train.progress import Display
from quatrain.train.schedule import precision_at, wsd


def train(
    config: RunConfig,
    *,
    recipe: str | Recipe | None = None,
    progress: bool = True,
    stop: Callable[[], bool] | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Train one run to its end, resuming what its folder already holds.

    Args:
        config: the run.
        recipe: name, path or value, in place of the configuration's.
        progress: show a progress bar (or lines, without a terminal) on stderr.
        stop: asked after every step; once it says True, the run is saved and ends like on Ctrl-C.
        restart: remove the folder's old run first.

    Returns:
        The summary, as `summary.json` has it; that of a run which is finished already is returned at once.

    Raises:
        ValueError: the folder holds another run, or the configuration does not fit the model or the data.
        NonFiniteError: loss, gradients, operands or weights are no longer finite; the last good checkpoint is kept,
            and metrics.jsonl says so until the run is taken up again.
        KeyboardInterrupt: after Ctrl-C, or when `stop` said so; the state is saved.
    """
    if isinstance(recipe, str):
        config, recipe = replace_in(config, recipe=recipe), None
    return Trainer(config, recipe=recipe, progress=progress, stop=stop).run(restart=restart)


class Trainer:
    """One run: its parts, and where it stands.

    Args:
        config: the run.
        recipe: already loaded; None loads the configuration's.
        progress, stop: as in `train`.
        on_event: passed to `checkpoint.save`.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        recipe: Recipe | None = None,
        progress: bool = True,
        stop: Callable[[], bool] | None = None,
        on_event: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.out = expand(config.out, "out")
        self.recipe: Recipe = recipe or load_recipe(config.recipe)
        self.total = config.total_steps
        self.schedule = wsd(config.schedule, config.optimizer.lr, self.total)
        self.phases = config.phases_of(self.recipe)
        optimizer_rows(config, self.recipe.optimizer)  # refuses what clashes, before anything is made
        self.progress, self.stop, self.on_event = progress, stop, on_event
        self.step = 0
        self.train_seconds = 0.0
        self.wall_seconds = 0.0
        self.steady = (0, 0.0)  # steps and seconds without the first step of each process, which compiles kernels

    def run(self, *, restart: bool = False) -> dict[str, Any]:
        """See `train`."""
        self._advice = "run again without --restart to resume it" if restart else "the same command resumes it"
        metrics = records.open_folder(self.out, self.config, self.recipe, restart=restart)
        try:
            summary = records.read_summary(self.out)
            display = Display(self.recipe.name, self.total, quiet=not self.progress)
            if summary is not None:
                display.say(f"{self.out} is finished already; --restart trains it again")
                return summary
            with settings(self.config.train), display:
                self.metrics, self.display = metrics, display
                self.parts = assemble(self.config, self.recipe, display)
                self.optimizer = make_optimizer(self.parts.model, self.config, self.parts.device, self.recipe.optimizer)
                self._resume()
                self._loop()
                return self._finish()
        finally:
            metrics.close()

    def _resume(self) -> None:
        """Continue from the newest whole checkpoint, or begin."""
        self.precision: str | None = None
        found = checkpoint.latest(self.out / records.CHECKPOINTS)
        self.metrics.rewind(found.step if found else -1)
        if found is None:
            return
        self._compare_ground(found.state)
        checkpoint.load(found, self.parts.model, self.optimizer)
        self.step = found.step
        self.train_seconds, self.wall_seconds = found.state["train_seconds"], found.state["wall_seconds"]
        self.steady = found.state.get("steady_steps", 0), found.state.get("steady_seconds", 0.0)
        self.display.say(f"resuming {self.out} at step {self.step} of {self.total}")

    def _compare_ground(self, state: Mapping[str, Any]) -> None:
        """Refuse other data and lost records; warn where the last bits may differ from an undisturbed run."""
        ground = self.parts.ground()
        if len(self.metrics.read()) != state["records"]:
            raise ValueError(
                f"{self.out / records.METRICS} has {len(self.metrics.read())} records where the checkpoint knows of "
                f"{state['records']}; put the file back, or begin anew with --restart"
            )
        if state["data"] != ground["data"]:
            raise ValueError(
                f"the text of data.path = {self.config.data.path!r} is not what {self.out} was trained on; "
                "put it back, choose another out, or begin anew with --restart"
            )
        differing = [key for key in ground if ground[key] != state[key]]
        if differing:
            changes = ", ".join(f"{key} ({state[key]} -> {ground[key]})" for key in differing)
            warnings.warn(f"resuming on other ground, last bits may differ: {changes}", RuntimeWarning, stacklevel=2)

    def _loop(self) -> None:
        self._since_log, begin = (self.step, self.train_seconds), self.step
        with watch(self.stop, quiet=not self.progress) as interrupt:
            mark = time.perf_counter()
            self._enter_phase()
            if self.step == 0:
                self._validate()
            if self.parts.device.type == "cuda" and self.step < self.total:
                self.display.waiting("the first step compiles kernels: a minute or two where none are cached")
            while self.step < self.total:
                self._advance(counted=self.step > begin)
                last, mark = mark, time.perf_counter()
                self.wall_seconds += mark - last
                stopping = bool(interrupt)
                if stopping or self._due(self.config.checkpoint.every):
                    self._save()
                if stopping:
                    self.display.say(f"saved step {self.step} of {self.total}; {self._advice}")
                    raise KeyboardInterrupt
                self._enter_phase()

    def _advance(self, counted: bool) -> None:
        """One optimizer step, its records and its validation; `counted` for the speed or not."""
        start = time.perf_counter()
        rate = self.schedule.rate(self.step)
        loss, norm = self._update(rate)
        self.step += 1
        seconds = time.perf_counter() - start
        self.train_seconds += seconds
        self.steady = (self.steady[0] + counted, self.steady[1] + counted * seconds)
        log = self.step == 1 or self._due(self.config.train.log_every)
        if log:
            self._log(loss, norm, rate)
        self.display.update(self.step, loss=loss, rate=rate, tokens_per_s=self._speed(), log=log)
        if self._due(self.config.validation.every):
            self._validate()

    def _update(self, rate: float) -> tuple[float, float]:
        """Forward, backward and update; (mean loss in nats per token, gradient norm before clipping)."""
        model, settings = self.parts.model, self.config.train
        model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.parts.device)
        with self._recorded():
            for batch in self._batches():
                loss = self.parts.loss(batch)
                (loss / settings.accumulate).backward()
                total += loss.detach() / settings.accumulate
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        loss_value, norm_value = torch.stack([total, norm.to(total)]).tolist()  # the step's one wait for the device
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            self._raise_nonfinite(f"the loss of the next step is {loss_value}, its gradient norm {norm_value}")
        if settings.clip:
            nn.utils.clip_grads_with_norm_(model.parameters(), settings.clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self._recorded():
            self.optimizer.step()
        return loss_value, norm_value

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """A weight that cannot be split anew, as it is no longer finite, ends the run like any other NaN."""
        try:
            yield
        except NonFiniteError as error:
            self._fail(str(error))

    def _raise_nonfinite(self, problem: str) -> None:
        """Name the operands of the forward pass alone, if any: a backward pass spreads a NaN to every module."""
        everywhere = self._operands()
        with self._undisturbed(), torch.no_grad():
            for batch in self._batches():
                self.parts.loss(batch)
        self._fail("; ".join(filter(None, (problem, self._operands() or everywhere))))

    def _check(self) -> None:
        """Raise if an operand has met a NaN or an infinity since the last check."""
        problem = self._operands()
        if problem:
            self._fail(problem)

    def _check_weights(self) -> None:
        """Raise if a weight is a NaN or an infinity; one wait for the device where none is."""
        named = [(name, p) for name, p in self.parts.model.named_parameters() if p.numel()]
        if not math.isfinite(nn.utils.get_total_norm([p for _, p in named], math.inf).item()):
            broken = [name for name, p in named if not p.isfinite().all()]
            more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
            self._fail(f"NaN or infinity in the weights {', '.join(broken[:3])}{more}")

    def _operands(self) -> str:
        try:
            check_finite(self.parts.model)
        except NonFiniteError as error:
            return str(error)
        return ""

    def _fail(self, problem: str) -> None:
        kept = sorted((self.out / records.CHECKPOINTS).glob("step-*"))
        error = NonFiniteError(
            f"step {self.step}: {problem}; {f'{kept[-1]} is kept' if kept else 'there is no checkpoint yet'}; "
            "lower optimizer.lr, lengthen schedule.warmup or look at the data"
        )
        self.metrics.write({"kind": "diverged", "step": self.step, "error": str(error)})
        raise error

    def _batches(self) -> Iterator[Tensor]:
        """The micro-batches of the next step."""
        for micro in range(self.config.train.accumulate):
            yield self.parts.train_batch(self.step * self.config.train.accumulate + micro)

    def _log(self, loss: float, norm: float, rate: float) -> None:
        self._check()
        step, seconds = self._since_log
        self._since_log = (self.step, self.train_seconds)
        tokens = (self.step - step) * self.config.tokens_per_step
        self.metrics.write(
            {
                "kind": "train",
                "step": self.step,
                "tokens": self.step * self.config.tokens_per_step,
                "loss": loss,
                "lr": rate,
                "grad_norm": norm,
                "tokens_per_s": tokens / (self.train_seconds - seconds),
            }
        )

    def _validate(self) -> None:
        """Record both validation losses (the recipe's forward, and BF16); the run itself does not notice."""
        model = self.parts.model
        with self._undisturbed():
            loss = self.parts.validation_loss()
            loss_bf16 = loss
            if self.parts.report.converted and self.precision is None:  # else the forward is BF16 already
                set_precision(model, "both")
                try:
                    loss_bf16 = self.parts.validation_loss()
                finally:
                    set_precision(model, self.precision)
        if not (math.isfinite(loss) and math.isfinite(loss_bf16)):
            self._fail(
                "; ".join(filter(None, (f"the validation loss is {loss}, in BF16 {loss_bf16}", self._operands())))
            )
        tokens = self.step * self.config.tokens_per_step
        self.metrics.write(
            {"kind": "val", "step": self.step, "tokens": tokens, "val_loss": loss, "val_loss_bf16": loss_bf16}
        )

    def _enter_phase(self) -> None:
        """Switch precision where a phase begins; a run that resumes inside one switches too, without a new record."""
        wanted = precision_at(self.phases, self.step)
        if wanted != self.precision:
            set_precision(self.parts.model, wanted)
            self.precision = wanted
        for start, bf16 in self.phases:
            if start == self.step:
                self.metrics.write({"kind": "phase", "step": start, "bf16": bf16})
                self.display.say(f"step {start}: {'the forward GEMMs' if bf16 == 'forward' else 'all GEMMs'} in BF16")

    def _save(self) -> None:
        self._check()
        self._check_weights()
        self.metrics.sync()
        state = {
            "train_seconds": self.train_seconds,
            "wall_seconds": self.wall_seconds,
            "steady_steps": self.steady[0],
            "steady_seconds": self.steady[1],
            "records": len(self.metrics.read()),
            **self.parts.ground(),
        }
        checkpoint.save(
            self.out / records.CHECKPOINTS,
            self.step,
            self.parts.model,
            self.optimizer,
            state=state,
            assets=self.parts.assets,
            keep=self.config.checkpoint.keep,
            on_event=self.on_event,
        )

    def _finish(self) -> dict[str, Any]:
        """Measure the final model, write the summary and return it."""
        set_precision(self.parts.model, None)
        with self._undisturbed():
            measured = self.parts.measure()
        validations = [record for record in self.metrics.read() if record["kind"] == "val"]
        summary = {
            "recipe": self.recipe.name,
            "fingerprint": self.recipe.fingerprint(),
            "seed": self.config.train.seed,
            "steps": self.total,
            "tokens": self.total * self.config.tokens_per_step,
            "val_loss_first": validations[0]["val_loss"],
            "val_loss": validations[-1]["val_loss"],
            "val_loss_bf16": validations[-1]["val_loss_bf16"],
            "tokens_per_s": self._speed(),
            "wall_s": self.wall_seconds,
            **measured,
            "quantized_mac_share": self.parts.report.quantized_mac_share,
            "converted": dict(self.parts.report.converted),
            "kept": dict(self.parts.report.kept),
            "parameters": sum(p.numel() for p in self.parts.model.parameters()),
            "optimizer": describe_optimizer(self.config, self.recipe.optimizer),
            "optimizer_bytes": state_bytes(self.optimizer),
            **self._realignments(),
            **self.parts.ground(),
            "dtype": self.config.train.dtype,
            "commit": records.commit(),
            "date": records.now(),
            "recipe_toml": self.recipe.to_toml(),
        }
        records.write_json(self.out / records.SUMMARY, summary)
        return summary

    def _realignments(self) -> dict[str, Any]:
        """How many splits this process has realigned, and its seconds; nothing without a parametrized split."""
        count, seconds = realign_cost(self.parts.model)
        return {"realigned": count, "realign_seconds": seconds} if count else {}

    def _speed(self) -> float:
        """Tokens a second of training steps."""
        steps, seconds = self.steady if self.steady[0] else (self.step, self.train_seconds)
        return steps * self.config.tokens_per_step / seconds

    def _due(self, every: int) -> bool:
        return self.step == self.total or (every > 0 and self.step % every == 0)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Whatever happens inside leaves the rounding clock, torch's generators, gradients and mode as they were."""
        clock, training = rng_state(self.parts.model), self.parts.model.training
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            try:
                yield
            finally:
                self.optimizer.zero_grad(set_to_none=True)
                self.parts.model.train(training)
                set_rng_state(self.parts.model, clock)
