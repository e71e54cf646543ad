"""`reszoo fit`, `validate`, `test` and `predict`: a LightningCLI around recipes and run folders."""

import json
import logging
import signal
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from reszoo.callbacks import AtomicCheckpointIO, EpochLines, FiniteGuard, MetricsLog, on_terminal
from reszoo.cli._arguments import Arguments, prepare
from reszoo.cli._explain import explain
from reszoo.cli._run_folder import RunFolder
from reszoo.cli.outcome import after_evaluation, after_fit, after_predict
from reszoo.errors import ReszooError, check_between
from reszoo.hub.bundle import check_finite
from reszoo.hub.checkpoint import open_checkpoint
from reszoo.preprocessing import ImageTransform
from reszoo.tasks import CHECKPOINT_KEY, ImageClassification, Task

_LOG = logging.getLogger(__name__)

NOT_SAVED = ("ckpt_path", "images", "config", "weights_only", "return_predictions", "verbose")
FOLLOWS_FROM_DATA = ("num_classes", "in_chans")


def main(command: str, argv: Sequence[str]) -> int:
    """Run one of the trainer's commands; bad input raises a `ReszooError`."""
    _quieten()
    arguments = prepare(command, argv)
    # Read once, before any data are; the weights are Lightning's to load.
    stored = {} if arguments.checkpoint is None else _usable(arguments.checkpoint, command)
    try:
        ReszooCLI(arguments, stored)
    except SIGTERMException:  # a SystemExit that would say 0
        print("reszoo: terminated", file=sys.stderr)
        return 128 + signal.SIGTERM
    except (MisconfigurationException, ModuleNotFoundError) as error:
        raise ReszooError(" ".join(str(error).split())) from error
    return 0


class ReszooCLI(LightningCLI):
    """A LightningCLI whose options are exact, whose classes follow from the data, and whose runs have a folder."""

    def __init__(self, arguments: Arguments, stored: dict[str, Any]) -> None:
        self.arguments = arguments
        self.stored = stored
        exact = {"allow_abbrev": False, "exit_on_error": False}
        super().__init__(
            Task,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,  # a checkpoint says what it holds in plain values of ours
            trainer_defaults={"enable_model_summary": False, "num_sanity_val_steps": 0, "log_every_n_steps": 10},
            parser_kwargs={**exact, **{name: dict(exact) for name in self.subcommands()}},
            args=[arguments.command, *arguments.argv],
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--recipe", type=str | None, default=None, help="Name of the run's folder under runs/.")
        parser.add_argument(
            "--monitor", type=str, default="val/accuracy", help="Metric that chooses the best checkpoint."
        )
        parser.add_argument("--monitor_mode", type=str, default="max", help="Whether `max` or `min` of it is best.")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "predict":
            parser.add_argument(
                "images", nargs="*", type=str, help="Pictures, or folders of them; the test split if none."
            )
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and turn the parser's refusal into one line."""
        argv, sys.argv = sys.argv, sys.argv[:1]  # LightningCLI warns where the process has words of its own
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            command = self._subcommand_parsers[self.arguments.command]
            known = [action.dest for action in command._actions if action.dest != "help"]
            raise ReszooError(explain(str(error), known)) from None
        finally:
            sys.argv = argv

    def _set_seed(self) -> None:
        """Seed every generator; a seed that numpy cannot take is refused in one line."""
        seed = self._get(self.config, "seed_everything")
        if type(seed) is int:
            check_between("seed_everything", seed, 0, 2**32 - 1)
        super()._set_seed()

    def _parse_ckpt_path(self) -> None:
        """Nothing: a checkpoint's values never override what a file or the line says."""

    def instantiate_classes(self) -> None:
        """Build the data first, let the network's classes and channels follow from it, then build the rest."""
        section = self.config[self.subcommand]
        if section.recipe is None:
            section.recipe = self.arguments.recipe or "unnamed"
        if section.get("model") is None:
            raise ReszooError("the recipe names no model; `reszoo recipes --show digits/resnet26` is an example")
        self.datamodule = self._build_data(section)
        self._follow_data(section)
        self.run_folder = RunFolder(Path(section.trainer.default_root_dir or "."), section.recipe)
        self.resolved = self._resolved(section)
        data, section["data"] = section["data"], None
        with our_own_errors():
            self.config_init = self.parser.instantiate(self.config)
        section["data"] = data
        self.model = self._get(self.config_init, "model")
        self.trainer = self.instantiate_trainer()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer, with this package's log, checkpoints and guards."""
        settings = self._get(self.config_init, "trainer")
        if settings.get("logger") is not None:
            raise ReszooError("trainer.logger: every run logs to its folder's metrics.jsonl and metrics.csv; drop it")
        if self.subcommand == "fit":
            _refuse_stepless(settings)
        folder = self.run_folder.path
        self.best = ModelCheckpoint(
            folder / "checkpoints",
            filename="best",
            monitor=self._get(self.config, "monitor"),
            mode=self._get(self.config, "monitor_mode"),
            enable_version_counter=False,
        )
        self.last = ModelCheckpoint(
            folder / "checkpoints",
            filename="last",
            enable_version_counter=False,
            save_on_train_epoch_end=True,  # whether or not the epoch was validated
        )
        self.log = MetricsLog(folder)
        own: dict[str, Any] = {"plugins": [*_as_list(settings.get("plugins")), AtomicCheckpointIO()]}
        callbacks = [*_as_list(settings.get("callbacks")), FiniteGuard()]
        if self.subcommand == "fit":
            callbacks += [LearningRateMonitor("step"), self.last, self.best]
            own["logger"] = self.log
            if not on_terminal():
                callbacks.append(EpochLines())
        else:
            own |= {"logger": False, "enable_checkpointing": False}
        if settings.get("enable_progress_bar") is None:
            own["enable_progress_bar"] = on_terminal()
        return Trainer(**{**settings, **own, "callbacks": callbacks, **kwargs})

    def fit(self, model: ImageClassification, **options: Any) -> None:
        """Train, test the best checkpoint once, and write down what came of it."""
        self._refuse_finished()
        data = self.datamodule.describe() if hasattr(self.datamodule, "describe") else None
        if self.trainer.is_global_zero:
            self.run_folder.make(self.resolved, self._get(self.config, "seed_everything"), data)
            self.log.folder = self.run_folder.path
            self.last.dirpath = self.best.dirpath = str(self.run_folder.path / "checkpoints")
            print(f"run folder: {self.run_folder.path}", flush=True)
        try:
            self.trainer.fit(model, datamodule=self.datamodule, ckpt_path=options.get("ckpt_path"))
            after_fit(self.trainer, model, self.datamodule, self.run_folder, self.best, self.resolved)
        except BaseException as error:
            self.run_folder.finish("failed", reason=f"{type(error).__name__}: {error}".splitlines()[0])
            if self.run_folder.remove_if_empty_handed() and isinstance(error, ReszooError):
                raise ReszooError(f"{error} (nothing was saved yet, so the run folder is removed)") from error
            if isinstance(error, SystemExit) and not isinstance(error, SIGTERMException):
                raise KeyboardInterrupt from error  # Lightning makes an exit of Ctrl-C
            raise

    def _tell_other_data(self) -> None:
        """Say so where an evaluation's data are not the run's: another split may hold samples that it trained on."""
        if self.arguments.run is None or not hasattr(self.datamodule, "describe"):
            return
        trained = json.loads((self.arguments.run / "results.json").read_text("utf-8")).get("data") or {}
        now = self.datamodule.describe()
        if trained.get("sha256") != now["sha256"]:
            _LOG.warning(
                "the data are not those of the run: %s %s here, %s %s in training; another split of the same set holds "
                "samples that the network was trained on",
                *(now["name"], str(now["sha256"])[:12], trained.get("name"), str(trained.get("sha256"))[:12]),
            )

    def validate(self, model: ImageClassification, **options: Any) -> None:
        """Measure on the validation split."""
        self._tell_other_data()
        self.trainer.validate(model, datamodule=self.datamodule, ckpt_path=options["ckpt_path"], verbose=False)
        after_evaluation(self.trainer, model, "validate", self.datamodule, self._outcome_folder("validate"))

    def test(self, model: ImageClassification, **options: Any) -> None:
        """Measure on the test split."""
        self._tell_other_data()
        self.trainer.test(model, datamodule=self.datamodule, ckpt_path=options["ckpt_path"], verbose=False)
        after_evaluation(self.trainer, model, "test", self.datamodule, self._outcome_folder("test"))

    def predict(self, model: ImageClassification, **options: Any) -> None:
        """Write one row a sample, in input order."""
        rows = self.trainer.predict(model, datamodule=self.datamodule, ckpt_path=options["ckpt_path"])
        stored = self._stored()
        after_predict(rows or [], self.datamodule, stored.get("labels"), self._outcome_folder("predict"))

    def _build_data(self, section: Namespace) -> LightningDataModule:
        """The data module of the recipe, or the pictures named on the line."""
        if section.get("images"):
            transform = self._stored().get("transform")
            if transform is None:
                raise ReszooError(f"checkpoint {str(self.arguments.checkpoint)!r} stores no transform for pictures")
            section["data"] = Namespace(
                class_path="reszoo.data.ImageFiles",
                init_args=Namespace(
                    paths=list(section.images), transform=ImageTransform.from_dict(transform).as_dict(), batch_size=64
                ),
            )
        if section.get("data") is None:
            raise ReszooError("the recipe names no data; `reszoo recipes --show digits/resnet26` is an example")
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(LightningDataModule, "data")
        with our_own_errors():
            return parser.instantiate(Namespace(data=section["data"])).data

    def _follow_data(self, section: Namespace) -> None:
        """Fill in the network's arguments that the data decide; a contradiction raises."""
        network = section.model.init_args.get("network")
        options = network.get("init_args") if isinstance(network, Namespace) else None
        if options is None:
            return
        if network.class_path == "timm.create_model":  # takes both by name, among whatever else its networks take
            network["dict_kwargs"] = {**dict.fromkeys(FOLLOWS_FROM_DATA), **(network.get("dict_kwargs") or {})}
            options = network["dict_kwargs"]
        stored = self._stored().get("arguments") or {}
        for name in FOLLOWS_FROM_DATA:
            if name not in options:
                continue
            keys = ("model", "init_args", "network", "dict_kwargs" if isinstance(options, dict) else "init_args", name)
            said, derived = self.arguments.says(*keys), getattr(self.datamodule, name, stored.get(name))
            if derived is None:
                continue
            if said is not None and int(said) != derived:
                raise ReszooError(
                    f"model.network.{name} is {said}, but the data {type(self.datamodule).__name__} has {derived}; "
                    f"leave {name} out, and it follows from the data"
                )
            options[name] = derived

    def _refuse_finished(self) -> None:
        """A checkpoint at or behind the end of the training would make a run of no step."""
        if self.arguments.checkpoint is None:
            return
        stored = self.stored
        if 0 <= self.trainer.max_steps <= stored["global_step"]:
            raise ReszooError(
                f"nothing to do: {str(self.arguments.checkpoint)!r} has {stored['global_step']} of "
                f"{self.trainer.max_steps} steps done; raise --trainer.max_steps to train on"
            )
        done, planned = stored["epoch"] + 1, self.trainer.max_epochs
        if planned is not None and 0 <= planned <= done:
            raise ReszooError(
                f"nothing to do: {str(self.arguments.checkpoint)!r} has {done} of {planned} epochs done; "
                "raise --trainer.max_epochs to train on"
            )

    def _stored(self) -> dict[str, Any]:
        """What the checkpoint says of its network; empty without one."""
        network: dict[str, Any] = self.stored.get(CHECKPOINT_KEY, {})
        return network

    def _resolved(self, section: Namespace) -> str:
        """The whole configuration as YAML, ready to be read again by any command."""
        values = yaml.safe_load(
            self._parser(self.subcommand).dump(section, skip_unset=False, format="yaml", skip_validation=True)
        )
        return yaml.safe_dump({k: v for k, v in values.items() if k not in NOT_SAVED}, sort_keys=False)

    def _outcome_folder(self, command: str) -> Path:
        """Where an evaluation writes: inside the run it measures, else in a new folder of its own."""
        if self.arguments.run is None:
            return self.run_folder.path.with_name(f"{command}_{self.run_folder.path.name}")
        return self.arguments.run / command / self.run_folder.path.name


@contextmanager
def our_own_errors() -> Iterator[None]:
    """Let a `ReszooError` out of the parser's wrapping, as it was raised."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ReszooError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from None


def _usable(checkpoint: Path, command: str) -> dict[str, Any]:
    """What a checkpoint says besides its tensors; one that is damaged, foreign, not finite or incomplete is refused."""
    values = open_checkpoint(checkpoint)
    needed = ["epoch", "global_step", "pytorch-lightning_version"]
    needed += ["optimizer_states", "lr_schedulers", "loops"] if command == "fit" else []
    missing = [key for key in needed if key not in values]
    if missing:
        raise ReszooError(
            f"checkpoint {str(checkpoint)!r} lacks {missing[0]!r}, which `reszoo {command}` needs; use one that a "
            "training wrote"
        )
    check_finite(values["state_dict"], f"checkpoint {str(checkpoint)!r}")
    return {key: values[key] for key in ("epoch", "global_step", CHECKPOINT_KEY)}


def _refuse_stepless(settings: Namespace) -> None:
    """A training that would take no step, or keep no checkpoint."""
    for name in ("max_epochs", "max_steps", "limit_train_batches"):
        if settings.get(name) == 0:
            raise ReszooError(f"trainer.{name} is 0, so there is nothing to train; give it a positive value")
    if settings.get("fast_dev_run"):
        raise ReszooError(
            "trainer.fast_dev_run keeps no checkpoint to test; use --trainer.max_steps and --trainer.limit_val_batches"
        )


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _quieten() -> None:
    """Say what is ours, once; silence advice of Lightning that a user of the command cannot follow."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    logging.getLogger("reszoo").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*exists and is not empty.*")
    # A training that ends before its first validation keeps `last`, and the table says so; a wrong name still raises.
    warnings.filterwarnings("ignore", message=".*could not find the monitored key.*")
    warnings.filterwarnings("ignore", message="The dirpath has changed.*")  # a resumed run has a folder of its own
    warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint need to be provided.*")
