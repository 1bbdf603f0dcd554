import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttsv.config.constraints import CONSTRAINTS, ClippingConfig
from ttsv.config.training import OPTIMIZERS, SCHEDULES, TrainingConfig
from ttsv.config.trial import TrialConfig, field_infos
from ttsv.data import DATASETS
from ttsv.errors import ConfigError
from ttsv.models import list_models
from ttsv.models.conv_shape import LAYERS

GOLDEN = json.loads((Path(__file__).parent / "golden_fingerprints.json").read_text())
REQUIRED: dict[str, Any] = {"dataset": "digits", "model": "small-cnn"}
INFOS = field_infos()

MEANINGS: dict[str, tuple[list[Any], list[Any]]] = {
    # path: values to take, values to refuse
    "dataset": (list(DATASETS), ["mnist", "", None, 3, "npz:../x", "synthetic:3x32x31:10:100"]),
    "model": ([*list_models(), "wrn10-1"], ["resnet", "wrn11-1", "lipconvnet-6", "", None]),
    "layer": (list(LAYERS), ["cp", None, 1]),
    "rank": ([1, 64, 2.0, 10**6, 0.25, 0.999, None], [0, -1, 0.0, -0.5, 1.5, 10**6 + 1, 1e300, "8", True, [8]]),
    "frames": (["free", "orthonormal"], ["fixed", None]),
    "lambda_ort": ([0, 0.0, 1e5], [-1e-9, math.nan, math.inf, None, "1", True, 10**400]),
    "ort_normalizer": (["paper", "code"], ["none", None]),
    "constraint": (list(CONSTRAINTS), ["multiply", None]),
    "delta": ([1, 1e-6, None], [0, 0.0, -1.0, math.nan, math.inf, "1", False]),
    "mean": ([[], [0.5], (0.1, 0.2, -0.3)], [[math.nan], ["1"], 0.5, None, [True]]),
    "std": ([[], [0.5], [1, 2.5]], [[0.0], [-1.0], [math.inf], 0.5, None]),
    "seed": ([0, 2**32 - 1], [-1, 2**32, 1.0, None, True]),
    "training.epochs": ([1, 100_000], [0, 100_001, 1.5, None, 10**400, -(10**400)]),
    "training.steps": ([1, None], [0, 1.5]),
    "training.batch_size": ([1, 1_000_000], [0, -5, 1_000_001, 2.0]),
    "training.optimizer": (list(OPTIMIZERS), ["lbfgs", None]),
    "training.lr": ([1, 1e-9], [0, -0.1, math.nan, math.inf, None]),
    "training.momentum": ([0, 0.5, 1], [-0.1, 1.1, math.nan]),
    "training.nesterov": ([True, False], [1, None]),
    "training.amsgrad": ([True, False], [0, None]),
    "training.eps": ([1e-8, 1], [0, -1e-8, None]),
    "training.weight_decay": ([0, 0.1], [-1e-4, math.inf, math.nan]),
    "training.schedule": (list(SCHEDULES), ["linear", None]),
    "training.milestones": ([[], [1], [60, 120, 160], (3, 4)], [[0], [2, 2], [3, 1], [1.5], ["1"], 5, None]),
    "training.gamma": ([1e-6, 1], [0, 1.5, math.nan]),
    "training.label_smoothing": ([0, 0.1], [1, -0.1, None]),
    "training.clip_gradient": ([1, 0.1, None], [0, -1.0, math.inf]),
    "training.ema": ([0, 0.999, None], [1.1, -0.1]),
    "training.precision": (["float32", "bf16", "fp16"], ["int8", None]),
    "training.tf32": ([True, False], [1, None]),
    "training.deterministic": ([True, False], [1, None]),
    "training.validation": (["held-out", "test"], ["train", None]),
    "training.select": (["last", "best"], ["first", None]),
    "training.convolutions": (["winograd", "direct"], ["fast", None]),
    "training.recalibrate": ([True, False], [1, None]),
    "training.soc_iterations": (["one", "code"], ["two", None]),
    "training.best_by": (["accuracy"], ["loss", None]),
    "training.keep_best": ([True, False], [1, None]),
    "training.final_projection": ([True, False], [0, None]),
    "training.spectra_every": ([1, 100_000, None], [0, -1, 1.5, "5"]),
    "training.cuda_graph": ([True, False], [1, None]),
    "augmentation.flip": ([True, False], [1, None]),
    "augmentation.pad": ([0, 4], [-1, 1.5, None]),
    "augmentation.padding": (["zeros", "symmetric"], ["reflect", None]),
    "clipping.every": ([1, 10_000, 10**400], [0, -1, 1.5, None, -(10**400)]),
    "clipping.rounds": ([1, 1000], [0, 1001, None]),
    "clipping.rescale": ([True, False], [1, 0, "yes", None]),
    "clipping.operator": (["periodic", "zero-padded"], ["dense", None]),
    "clipping.floor": ([0.1, None], [0, -1.0]),
    "clipping.linear": ([True, False], [1, None]),
    "division.conv": ([7, None], [0, -1.0, math.inf]),
    "division.linear": ([3.9, None], [0]),
    "division.batch_norm": ([10, None], [0]),
    "division.every": ([1, 5], [0, None]),
    "division.power_iterations": ([1, 2, None], [0, 1.5]),
    "division.operator": (["periodic", "zero-padded"], ["dense", None]),
    "division.batch_norm_eps": ([1e-6, None], [0]),
    "evaluation.attack": (["none", "pgd", "autoattack", "both"], ["fgsm", None]),
    "evaluation.attack_norm": (["L2", "Linf", "L1"], ["L3", 2, None]),
    "evaluation.attack_eps": ([0.5, 1], [0, -0.5, math.nan, math.inf, None]),
    "evaluation.attack_version": (["standard", "plus", "rand"], ["custom", None]),
    "evaluation.attack_images": ([1, 10_000, None], [0, -1, 1.5]),
    "evaluation.corruptions": (["none", "generated"], ["some", True, None]),
    "evaluation.corruption_images": ([1, None], [0, 0.5]),
    "evaluation.certified": ([True, False], [1, None]),
    "evaluation.radii": ([[], [36 / 255], (0.5, 1.0)], [[0.0], [-0.1], [math.inf], [math.nan], 0.5, None]),
    "evaluation.lipschitz": (["none", "fgsm", "ascent", "both"], ["pgd", None]),
    "evaluation.lipschitz_images": ([1, None], [0]),
    "evaluation.batch_size": ([1, 512, None], [0, -1]),
    "evaluation.seed": ([0, 2**32 - 1], [-1, 2**32, None]),
}


def trial(path: str = "seed", value: Any = 0, **others: Any) -> TrialConfig:
    """A trial with one field set by its path."""
    data: dict[str, Any] = {**REQUIRED, **others}
    part, _, name = path.rpartition(".")
    if part:
        data[part] = {**data.get(part, {}), name: value}
    else:
        data[path] = value
    return TrialConfig.from_dict(data)


def read(config: TrialConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


# --- fields ---


def test_every_field_is_tested_here() -> None:
    assert INFOS.keys() == MEANINGS.keys()


@pytest.mark.parametrize("path", INFOS)
def test_every_field_is_documented(path: str) -> None:
    info = INFOS[path]
    assert info.path == path
    assert len(info.doc) > 3
    assert info.schema()["description"] == info.doc
    assert info.check is not None or info.types == (bool,)


@pytest.mark.parametrize("path", MEANINGS)
def test_right_values_are_taken(path: str) -> None:
    for value in MEANINGS[path][0]:
        found = read(trial(path, value), path)
        assert found == (tuple(value) if isinstance(value, list) else value)
        assert type(found) in INFOS[path].types


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, (_, wrong) in MEANINGS.items() for value in wrong], ids=repr
)
def test_a_wrong_value_is_named_with_its_fix(path: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        trial(path, value)
    assert error.value.field == path
    assert error.value.failure == "bad_config"
    assert path in str(error.value)
    assert error.value.fix.startswith("must")


@pytest.mark.parametrize("part", ["training", "augmentation", "clipping", "division", "evaluation"])
def test_parts_must_be_objects(part: str) -> None:
    wrong: list[Any] = [None, 3, [], "sgd"]
    for value in wrong:
        with pytest.raises(ConfigError) as error:
            trial(part, value)
        assert error.value.field == part


def test_unknown_and_missing_fields_are_named() -> None:
    for path in ("ranks", "training.learning_rate", "clipping.delta"):
        with pytest.raises(ConfigError, match="unknown; the fields here are") as error:
            trial(path, 1)
        assert error.value.field == path
    for name in REQUIRED:
        with pytest.raises(ConfigError, match="is required") as error:
            TrialConfig.from_dict({key: value for key, value in REQUIRED.items() if key != name})
        assert error.value.field == name


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        trial().seed = 1  # type: ignore[misc]


# --- plain data ---

STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "layer": st.sampled_from(LAYERS),
    "rank": st.none() | st.integers(1, 512),
    "lambda_ort": st.floats(0, 1e6),
    "constraint": st.sampled_from(CONSTRAINTS),
    "delta": st.none() | st.floats(1e-3, 1e3),
    "seed": st.integers(0, 2**32 - 1),
    "training": st.fixed_dictionaries(
        {},
        optional={
            "optimizer": st.sampled_from(OPTIMIZERS),
            "schedule": st.sampled_from(SCHEDULES),
            "momentum": st.floats(0, 1),
            "gamma": st.floats(0.01, 1),
            "milestones": st.sets(st.integers(1, 300)).map(sorted),
        },
    ),
    "evaluation": st.fixed_dictionaries(
        {},
        optional={
            "attack": st.sampled_from(["none", "pgd", "autoattack", "both"]),
            "attack_norm": st.sampled_from(["L2", "Linf"]),
            "attack_eps": st.floats(1e-3, 10),
            "attack_version": st.sampled_from(["standard", "plus"]),
            "attack_images": st.none() | st.integers(1, 100),
            "corruptions": st.sampled_from(["none", "generated"]),
            "corruption_images": st.none() | st.integers(1, 100),
            "certified": st.booleans(),
            "radii": st.lists(st.floats(0.01, 2), max_size=3),
            "lipschitz": st.sampled_from(["none", "fgsm", "both"]),
            "lipschitz_images": st.none() | st.integers(1, 100),
            "batch_size": st.none() | st.integers(1, 100),
            "seed": st.integers(0, 9),
        },
    ),
    "clipping": st.fixed_dictionaries(
        {}, optional={"every": st.integers(1, 1000), "rescale": st.booleans(), "rounds": st.integers(1, 9)}
    ),
}
trials = st.fixed_dictionaries({}, optional=STRATEGIES).map(lambda d: TrialConfig.from_dict({**REQUIRED, **d}))


@given(trials)
def test_a_trial_comes_back_from_json(config: TrialConfig) -> None:
    assert TrialConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config


# --- what is the same trial ---


@given(trials)
def test_the_canonical_form_is_final_and_has_the_same_fingerprint(config: TrialConfig) -> None:
    canonical = config.canonical()
    assert canonical.canonical() == canonical
    assert canonical.fingerprint() == config.fingerprint()
    assert canonical.seed == config.seed


@given(trials, trials)
def test_fingerprints_tell_canonical_trials_apart(one: TrialConfig, other: TrialConfig) -> None:
    assert (one.canonical() == other.canonical()) == (one.fingerprint() == other.fingerprint())


@given(trials, st.integers(0, 2**32 - 1))
def test_a_cell_is_a_trial_without_its_seed(config: TrialConfig, seed: int) -> None:
    other = dataclasses.replace(config, seed=seed)
    assert config.cell() == other.cell()
    assert (config.fingerprint() == other.fingerprint()) == (seed == config.seed)


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"layer": "tt", "rank": None, "lambda_ort": 3.0}, {}),
    ({"layer": "dense", "rank": 8}, {}),
    ({"layer": "dense", "lambda_ort": 1.0}, {}),
    ({"constraint": "clip", "delta": None, "clipping": {"every": 5}}, {}),
    ({"constraint": "none", "delta": 2.0}, {}),
    ({"training": {"schedule": "cosine", "milestones": [3], "gamma": 0.2}}, {}),
    (
        {"training": {"schedule": "multistep", "epochs": 5, "milestones": [2, 5, 7]}},
        {"training": {"schedule": "multistep", "epochs": 5, "milestones": [2]}},
    ),
    (
        {"training": {"schedule": "multistep", "epochs": 5, "milestones": [5], "gamma": 0.2}},
        {"training": {"schedule": "constant", "epochs": 5}},
    ),
    ({"mean": [0.5], "std": [0.5]}, {}),
    ({"dataset": "cifar10", "mean": [0.5, 0.5, 0.5], "std": [0.5]}, {"dataset": "cifar10"}),
    ({"dataset": "npz:own", "mean": [0.2, 0.2, 0.2]}, {"dataset": "npz:own", "mean": [0.2]}),
    (
        {"constraint": "clip", "delta": 1.0, "clipping": {"rescale": False, "operator": "zero-padded"}},
        {"constraint": "clip", "delta": 1.0, "clipping": {"rescale": False}},
    ),
    ({"training": {"optimizer": "adam", "momentum": 0.5}}, {"training": {"optimizer": "adam"}}),
    ({"training": {"amsgrad": True, "eps": 1e-3}}, {}),
    ({"training": {"momentum": 0, "nesterov": False}}, {"training": {"momentum": 0}}),
    ({"layer": "soc-tt", "rank": None}, {"layer": "soc"}),
    ({"layer": "dense", "frames": "orthonormal", "ort_normalizer": "code"}, {}),
    (
        {"layer": "tt", "rank": 8, "frames": "orthonormal", "lambda_ort": 2.0},
        {"layer": "tt", "rank": 8, "frames": "orthonormal"},
    ),
    ({"layer": "tt", "rank": 8, "ort_normalizer": "code"}, {"layer": "tt", "rank": 8}),
    ({"constraint": "divide", "division": {"every": 3}}, {}),
    (
        {
            "constraint": "divide",
            "division": {"batch_norm": 7, "power_iterations": 3, "operator": "periodic"},
        },
        {"constraint": "divide", "division": {"batch_norm": 7}},
    ),
    (
        {"constraint": "divide", "division": {"linear": 7, "operator": "periodic", "batch_norm_eps": 1e-6}},
        {"constraint": "divide", "division": {"linear": 7}},
    ),
    ({"division": {"conv": 7}, "augmentation": {"padding": "symmetric"}}, {}),
    (
        {"constraint": "divide", "division": {"conv": 7}, "delta": 2, "clipping": {"every": 3}},
        {"constraint": "divide", "division": {"conv": 7}},
    ),
    ({"constraint": "clip", "delta": 1}, {"constraint": "clip", "delta": 1.0}),
    ({"seed": 0, "training": {"epochs": 20}}, {}),
    ({"evaluation": {"attack_eps": 8.0, "attack_images": 9, "batch_size": 4, "seed": 1, "radii": [0.5]}}, {}),
    ({"evaluation": {"corruption_images": 3, "lipschitz_images": 3, "attack_version": "plus"}}, {}),
    ({"evaluation": {"attack": "pgd", "attack_version": "plus"}}, {"evaluation": {"attack": "pgd"}}),
    ({"evaluation": {"certified": True, "seed": 4}}, {"evaluation": {"certified": True}}),
]
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"layer": "tt", "rank": 8}, {}),
    ({"layer": "tt", "rank": 8}, {"layer": "tt", "rank": 9}),
    ({"layer": "tt", "rank": 8, "lambda_ort": 1.0}, {"layer": "tt", "rank": 8}),
    ({"constraint": "clip", "delta": 1.0}, {}),
    ({"constraint": "clip", "delta": 1.0, "clipping": {"every": 5}}, {"constraint": "clip", "delta": 1.0}),
    ({"training": {"schedule": "multistep", "milestones": [3]}}, {"training": {"schedule": "multistep"}}),
    ({"training": {"momentum": 0.5}}, {}),
    ({"training": {"optimizer": "adam"}}, {}),
    ({"dataset": "cifar10"}, {}),
    ({"layer": "tt", "rank": 8, "frames": "orthonormal"}, {"layer": "tt", "rank": 8}),
    ({"layer": "soc-tt", "rank": 8}, {"layer": "tt", "rank": 8}),
    ({"constraint": "divide", "division": {"batch_norm": 7}}, {}),
    (
        {"constraint": "divide", "division": {"linear": 7, "power_iterations": 3}},
        {"constraint": "divide", "division": {"linear": 7}},
    ),
    ({"training": {"select": "best"}}, {}),
    ({"augmentation": {"pad": 4, "padding": "symmetric"}}, {"augmentation": {"pad": 4}}),
    ({"mean": [0.4]}, {}),
    ({"std": [0.4]}, {"mean": [0.4]}),
    ({"dataset": "cifar10", "mean": [0.5, 0.5, 0.4]}, {"dataset": "cifar10", "mean": [0.5]}),
    (
        {"constraint": "clip", "delta": 1.0, "clipping": {"operator": "zero-padded"}},
        {"constraint": "clip", "delta": 1.0},
    ),
    ({"evaluation": {"attack": "pgd"}}, {}),
    ({"evaluation": {"attack": "pgd"}}, {"evaluation": {"attack": "autoattack"}}),
    ({"evaluation": {"attack": "pgd", "attack_eps": 0.25}}, {"evaluation": {"attack": "pgd"}}),
    ({"evaluation": {"attack": "pgd", "seed": 1}}, {"evaluation": {"attack": "pgd"}}),
    ({"evaluation": {"certified": True}}, {}),
    ({"evaluation": {"lipschitz": "fgsm"}}, {"evaluation": {"lipschitz": "both"}}),
    ({"evaluation": {"corruptions": "generated"}}, {}),
    ({"evaluation": {"corruptions": "generated", "seed": 3}}, {"evaluation": {"corruptions": "generated"}}),
]


def test_a_floor_above_delta_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"clipping\.floor = 2\.0: must be at most delta, 1"):
        trial("clipping.floor", 2.0, constraint="clip", delta=1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"dataset": "digits", "corruptions": "published"},
            r"evaluation\.corruptions = 'published': must be generated",
        ),
        (
            {"dataset": "digits", "attack": "pgd", "attack_norm": "L1"},
            r"attack_norm = 'L1': must be L2 or Linf for PGD",
        ),
        ({"dataset": "synthetic:1x16:10:200", "attack": "autoattack"}, r"evaluation\.attack = .*must be none"),
        (
            {"dataset": "synthetic:2x16x16:10:200", "corruptions": "generated"},
            r"evaluation\.corruptions = .*2 channels",
        ),
        ({"dataset": "synthetic:3x16x16:3:200", "attack": "autoattack"}, "AutoAttack needs 4 classes"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_evaluation_that_the_data_set_cannot_have_is_refused(fields: dict[str, Any], message: str) -> None:
    evaluation = {name: value for name, value in fields.items() if name != "dataset"}
    with pytest.raises(ConfigError, match=message):
        trial(dataset=fields["dataset"], evaluation=evaluation)


def test_published_corruptions_are_those_of_cifar() -> None:
    for dataset in ("cifar10", "cifar100"):
        assert trial(dataset=dataset, evaluation={"corruptions": "published"}).evaluation.corruptions == "published"


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_has_no_effect_makes_no_other_trial(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = TrialConfig.from_dict({**REQUIRED, **one}), TrialConfig.from_dict({**REQUIRED, **other})
    assert first.fingerprint() == second.fingerprint()
    assert first.canonical() == second.canonical()


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_has_an_effect_makes_another_trial(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = TrialConfig.from_dict({**REQUIRED, **one}), TrialConfig.from_dict({**REQUIRED, **other})
    assert first.fingerprint() != second.fingerprint()
    assert first.cell() != second.cell()


@pytest.mark.parametrize("name", GOLDEN)
def test_fingerprints_never_change(name: str) -> None:
    """They are in databases: a new field must have a default that leaves them as they are."""
    golden = GOLDEN[name]
    config = TrialConfig.from_dict(golden["trial"])
    assert config.fingerprint() == golden["fingerprint"]
    assert config.cell() == golden["cell"]


def test_defaults_of_the_parts() -> None:
    assert TrialConfig(**REQUIRED).training == TrainingConfig()
    assert TrialConfig(**REQUIRED).clipping == ClippingConfig()
    assert TrialConfig.from_dict(REQUIRED) == TrialConfig(**REQUIRED)


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, ttsv.config.trial; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
