"""Training states and models on disk: safetensors beside JSON that holds their SHA-256. Nothing is pickled."""

import hashlib
import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeAlias

import safetensors
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ttsv.config.fields import JsonObject, TrialFields
from ttsv.errors import ConfigError, DataError
from ttsv.models import ModelArguments, create_model
from ttsv.models.build import Normalize
from ttsv.runtime.faults import fault

KEPT = 2
"""Checkpoints kept: should the newest be damaged, the one before is there."""

_DESCRIPTION = "ttsv"
"""The entry of a network's file that says how to build it."""

_TENSOR, _STRIDES = "$tensor", "$strides"


State: TypeAlias = dict[str, Any]
"""What a training goes on from, as it was given to `Checkpoints.start`: its owner knows what is in it."""


class Checkpoints:
    """The checkpoints of one trial in a folder (created), newest last.

    `identity` (JSON-ready) says what the states belong to: those of another identity are not resumed, unless it is one
    of the `aliases`, by which earlier versions knew the same. Tensors of a
    state keep their layout in memory, on which the order of sums and so their rounding depends. A checkpoint is its
    tensors in `NUMBER.safetensors`, and `NUMBER.json`, written after them: without a whole JSON file there is no
    checkpoint.

    As a context it waits in the end for the one that is being written.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any], aliases: Sequence[Mapping[str, Any]] = ()) -> None:
        self.folder = folder
        self.identity = dict(identity)
        self._known = [self.identity, *map(dict, aliases)]
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("*.tmp"):
            unfinished.unlink()
        for tensors in folder.glob("*.safetensors"):  # of a process that was killed after them, or before they went
            if tensors.stem.isdecimal() and not tensors.with_suffix(".json").exists():
                tensors.unlink()
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # of two failures that of the training says more
                raise

    def start(self, number: int, state: Mapping[str, object]) -> None:
        """Copies a state, and writes it as checkpoint `number` (the epochs done) while its owner goes on.

        The state is a tree of mappings with strings for keys, lists, tensors and JSON values; it may change as soon as
        this returns. Waits for the checkpoint before, so that there are never two at a time. Once it is written all but
        the last two are deleted. A process killed at any moment leaves the checkpoints before this one whole.
        """
        self.wait()
        tensors: dict[str, Tensor] = {}
        body = {"identity": self.identity, "state": _pack(state, "", tensors)}
        tensors = _copies(tensors)

        def write() -> None:
            try:
                self._write(number, body, tensors)
            except BaseException as failure:
                self._failure = failure

        # No daemon: an interpreter that ends waits for it.
        self._writer = threading.Thread(target=write, name=f"checkpoint {number}")
        self._writer.start()

    def wait(self) -> None:
        """Waits until the checkpoint that was started last is on disk. Raises what its writing raised, once."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def save(self, number: int, state: Mapping[str, object]) -> None:
        """As `start`, and waits until it is on disk."""
        self.start(number, state)
        self.wait()

    def _write(self, number: int, body: Mapping[str, object], tensors: dict[str, Tensor]) -> None:
        content = save(tensors)
        _write(self._tensors(number), content)
        fault("after_tensors")
        record = {"body": body, "body_sha256": _sha256(_json(body)), "tensors_sha256": _sha256(content)}
        _write(self._record(number), _json(record))
        fault("after_checkpoint")
        for old in self._numbers()[:-KEPT]:
            self._delete(old)

    def latest(self) -> State | None:
        """The newest state that is whole and has this identity, its tensors on the CPU; None without one.

        Newer ones, damaged or of another identity, are deleted: their numbers are written again. One that cannot be
        read now may be whole: it stays, and where there is no other its `OSError` is raised.
        """
        self.wait()
        unread: OSError | None = None
        for number in reversed(self._numbers()):
            try:
                state = self._read(number)
            except OSError as error:
                unread = unread or error
                continue
            if state is not None:
                return state
            self._delete(number)
        if unread is not None:
            raise unread
        return None

    def _delete(self, number: int) -> None:
        self._record(number).unlink()
        self._tensors(number).unlink(missing_ok=True)

    def _read(self, number: int) -> State | None:
        try:
            record = json.loads(self._record(number).read_bytes())
            body = record["body"]
            content = self._tensors(number).read_bytes()
            if body["identity"] not in self._known or record["body_sha256"] != _sha256(_json(body)):
                return None
            if record["tensors_sha256"] != _sha256(content):
                return None
            state: State = _unpack(body["state"], load(content))
        except (FileNotFoundError, ValueError, KeyError, TypeError, safetensors.SafetensorError):
            return None
        return state

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdecimal())

    def _record(self, number: int) -> Path:
        return self.folder / f"{number:06d}.json"

    def _tensors(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class SavedNetwork:
    """A network that `save_model` wrote, and what was written of it.

    `config`: the configuration that it was trained by, as plain data; None where that was not written. `training`: what
    was noted of its training by the names of `ttsv.training.record.TrainingFacts`, empty where nothing was.
    """

    model: nn.Module
    arguments: ModelArguments
    config: TrialFields | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


def save_model(
    folder: Path, model: nn.Module, arguments: Mapping[str, Any], *, name: str = "model", **facts: Any
) -> Path:
    """Writes `NAME.safetensors` and `NAME.json`, from which `load_network` rebuilds the network; returns the former.

    `arguments` are those of `create_model`; `facts` (JSON-ready) are kept beside them. The former alone is enough to
    rebuild the network: it holds the arguments, and of the facts the configuration (`config`) but its `evaluation`,
    which are the same whenever the weights are.
    """
    tensors = _copies(model.state_dict())
    told: JsonObject = {"model": dict(arguments)}
    if "config" in facts:
        told["config"] = {name: value for name, value in facts["config"].items() if name != "evaluation"}
    told["sha256"] = _told_sha256(told, tensors)
    # A single entry: several have no order of their own in the file.
    content = save(tensors, metadata={_DESCRIPTION: json.dumps(told)})
    path = folder / f"{name}.safetensors"
    _write(path, content)
    _write(path.with_suffix(".json"), _json({"model": dict(arguments), "sha256": _sha256(content), **facts}))
    return path


def restore_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Takes up a saved `state_dict`, and its tensors' layouts in memory: what a step replaces may have another one."""
    for name, own in model.state_dict(keep_vars=True).items():
        if own.stride() != state[name].stride():
            own.data = torch.empty_like(state[name], device=own.device)
    load_weights(model, state)


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Loads a network's tensors by name, of which none may be missing or left over (`RuntimeError`).

    A file of tensors does not have the versions of modules that `state_dict` gives, without which torchvision's
    MNASNets load nothing: they are the network's own.
    """
    state = model.state_dict()
    state.clear()
    state.update(tensors)
    model.load_state_dict(state)


def load_network(path: Path) -> SavedNetwork:
    """The network that `save_model` wrote, on the CPU, in evaluation mode, and what was written of it.

    `path`: the file of weights, whatever its name is now. It is described by the JSON file of the same name beside it,
    or where there is none, by itself: that has the `model` and `config` alone. Raises `DataError` where a file is
    missing, cut or altered.
    """
    beside = path.with_suffix(".json")
    try:
        content = path.read_bytes()
        itself = _description(path)
        described = json.loads(beside.read_bytes()) if beside.exists() else itself
        if described is None:
            raise ValueError("no JSON file is beside it, and it does not say itself how its network is built")
        arguments, expected = dict(described["model"]), described["sha256"]
        tensors = load(content)
    except safetensors.SafetensorError as error:
        raise DataError(f"{path} is cut or altered: {error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path.parent} holds no whole model ({beside.name}, {path.name}): {error}") from error
    if (_sha256(content) if beside.exists() else _told_sha256(described, tensors)) != expected:
        raise DataError(f"{path} is cut or altered: its SHA-256 is not {expected}")
    if itself is not None and itself["model"] != arguments:
        raise DataError(f"{beside} is altered: its `model` is not that of the weights")
    try:
        with torch.random.fork_rng(devices=[]):
            model = create_model(**arguments)
        if any(tensor.dtype == torch.float64 for tensor in tensors.values()):  # of less exact ones float32 is as good
            model.double()
        told = _normalisations(model)
        load_weights(model, tensors)
    except (ConfigError, TypeError, RuntimeError) as error:
        raise DataError(f"{beside} is altered: the weights are of another network ({error})") from error
    # As near as the least exact type that weights may be kept in.
    if not all(torch.allclose(*both, rtol=2**-8) for both in zip(told, _normalisations(model), strict=True)):
        raise DataError(f"{beside} is altered: its mean and std are not those of the weights")
    named = {field.name: arguments[field.name] for field in fields(ModelArguments) if field.name in arguments}
    return SavedNetwork(
        model=model.eval(),
        arguments=ModelArguments(**named),
        config=described.get("config"),
        training=described.get("training", {}),
    )


def _description(path: Path) -> dict[str, Any] | None:
    """What the file of weights says of its network; None where it says nothing."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    found: dict[str, Any] | None = json.loads(metadata[_DESCRIPTION]) if _DESCRIPTION in metadata else None
    return found


def _normalisations(model: nn.Module) -> list[Tensor]:
    """Copies of what the network's pixels are normalised with, which is in its arguments and among its weights."""
    return [value.clone() for part in model.modules() if isinstance(part, Normalize) for value in (part.mean, part.std)]


def _pack(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON, each tensor replaced by a name, under which it goes into `tensors`."""
    if isinstance(tree, Tensor):
        name = f"{len(tensors)} {path}"  # a path alone may be that of two tensors: keys can hold dots
        tensors[name] = tree
        return {_TENSOR: name, _STRIDES: list(tree.stride())}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"keys of {path or 'a state'} must be strings")
        return {key: _pack(value, f"{path}.{key}".lstrip("."), tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_pack(value, f"{path}.{index}".lstrip("."), tensors) for index, value in enumerate(tree)]
    return tree


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, row by row; those of a GPU's are all under way before the first is waited for."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            found[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            found[name] = tensor.detach().contiguous().to("cpu", non_blocking=True)
    for device in {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}:
        torch.cuda.synchronize(device)
    return found


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {_TENSOR, _STRIDES}:
            found = tensors[tree[_TENSOR]]
            return torch.empty_strided(found.shape, tree[_STRIDES], dtype=found.dtype).copy_(found)
        return {key: _unpack(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_unpack(value, tensors) for value in tree]
    return tree


def _json(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, indent=1).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _told_sha256(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Over what is said of a network but this, and its weights: names, types, shapes and values, on the CPU."""
    digest = hashlib.sha256(_json({name: value for name, value in described.items() if name != "sha256"}))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Replaces a file as a whole: after a crash at any moment there is the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
