"""From a spec to its trials."""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from service.errors import SpecError
from service.specs import planner
from service.specs.grid import Plan, count_grid, expand_grid
from service.specs.planner import GridCount
from service.specs.spec import ExperimentSpec
from tests.effort import effort
from tests.examples import examples
from ttsv.config.trial import TrialConfig, field_infos
from ttsv.data.catalog import DatasetName

BASE = {"dataset": "digits", "model": "small-cnn"}
SCHEMA = ExperimentSpec.model_json_schema()


def spec_of(base: dict[str, Any] | None = None, grid: dict[str, list[Any]] | None = None) -> ExperimentSpec:
    return ExperimentSpec(name="test", base=BASE if base is None else base, grid=grid or {})


def expand(base: dict[str, Any] | None = None, grid: dict[str, list[Any]] | None = None, *, most: int = 1000) -> Plan:
    return expand_grid(spec_of(base, grid), max_trials=most)


def problems_of(base: dict[str, Any] | None = None, grid: dict[str, list[Any]] | None = None) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        expand(base, grid)
    return {problem.field: problem.message for problem in caught.value.problems}


class TestExpansion:
    def test_no_axis_is_one_trial(self) -> None:
        (planned,) = expand().trials
        assert planned.config == TrialConfig(dataset="digits", model="small-cnn")
        assert planned.fingerprint == planned.config.fingerprint()
        assert planned.cell == planned.config.cell()

    def test_the_last_axis_is_fastest(self) -> None:
        axes: dict[str, list[Any]] = {"training.epochs": [2, 1], "seed": [7, 3, 5]}
        found = [(p.config.training.epochs, p.config.seed) for p in expand(grid=axes).trials]
        assert found == list(itertools.product([2, 1], [7, 3, 5]))

    def test_base_reaches_every_trial(self) -> None:
        base = BASE | {"training": {"epochs": 5, "milestones": [1, 3], "schedule": "multistep"}, "delta": 2}
        base |= {"constraint": "clip", "clipping": {"every": 7}}
        for planned in expand(base, {"seed": [0, 1], "training.lr": [1, 0.5]}).trials:
            assert (planned.config.training.epochs, planned.config.training.milestones) == (5, (1, 3))
            assert (planned.config.clipping.every, planned.config.delta) == (7, 2.0)

    def test_an_axis_joins_the_part_that_base_gives(self) -> None:
        plan = expand(BASE | {"training": {"epochs": 5}}, {"training.lr": [0.5]})
        assert (plan.trials[0].config.training.epochs, plan.trials[0].config.training.lr) == (5, 0.5)

    def test_required_fields_may_be_axes(self) -> None:
        assert len(expand({}, {"dataset": ["digits", "cifar10"], "model": ["small-cnn"]}).trials) == 2

    def test_points_that_train_the_same_network_are_one_trial(self) -> None:
        """A dense layer has no frames: lambda_ort does nothing there."""
        base = BASE | {"layer": "tt"}
        plan = expand(base, {"rank": [None, 4, 8], "lambda_ort": [0.0, 1, 10.0], "seed": [0, 1]})
        assert (plan.points, len(plan.trials)) == (18, 2 + 2 * 3 * 2)
        assert len({planned.fingerprint for planned in plan.trials}) == len(plan.trials)
        dense = [planned.config for planned in plan.trials if planned.config.rank is None]
        assert [(config.layer, config.lambda_ort, config.seed) for config in dense] == [
            ("dense", 0.0, 0),
            ("dense", 0.0, 1),
        ]

    def test_a_value_given_twice_is_one_trial(self) -> None:
        plan = expand(grid={"seed": [1, 1], "training.lr": [1, 1.0]})
        assert (plan.points, len(plan.trials)) == (4, 1)

    def test_variants_are_laid_over_base_and_multiplied_by_the_grid(self) -> None:
        base = BASE | {"layer": "tt", "training": {"lr": 0.5, "epochs": 7}}
        variants: list[dict[str, Any]] = [
            {"rank": 4, "training": {"lr": 0.1}},
            {"rank": 8, "constraint": "clip", "delta": 1.0, "clipping": {"every": 3}},
        ]
        spec = ExperimentSpec(name="test", base=base, variants=variants, grid={"seed": [1, 2]})
        plan = expand_grid(spec, max_trials=4)
        assert plan.points == 4
        found = [(p.config.rank, p.config.training.lr, p.config.delta, p.config.seed) for p in plan.trials]
        assert found == [(4, 0.1, None, 1), (4, 0.1, None, 2), (8, 0.5, 1.0, 1), (8, 0.5, 1.0, 2)]
        assert {p.config.training.epochs for p in plan.trials} == {7}
        assert [p.config.clipping.every for p in plan.trials] == [100, 100, 3, 3]
        with pytest.raises(SpecError, match="2 x 2 = 4 points; at most 3"):
            expand_grid(spec, max_trials=3)

    def test_wrong_variants_are_named(self) -> None:
        variants: list[dict[str, Any]] = [
            {"dataset": "digits", "rank": 4},
            {"dataset": "digits", "rank": 0, "colour": 1, "training": {"lr": -1.0}, "seed": 3},
        ]
        spec = ExperimentSpec(name="test", base={"model": "small-cnn"}, variants=variants, grid={"seed": [1]})
        with pytest.raises(SpecError) as caught:
            expand_grid(spec, max_trials=10)
        assert [problem.field for problem in caught.value.problems] == [
            "variants[1].colour",
            "variants[1].rank",
            "variants[1].training.lr",
            "grid.seed",
        ]
        spec = ExperimentSpec(name="test", base={"model": "small-cnn"}, variants=[{"dataset": "digits"}, {}])
        with pytest.raises(SpecError, match=r"base\.dataset: is required, here, in every variant or as an axis"):
            expand_grid(spec, max_trials=10)

    def test_fields_that_do_not_go_together_are_named(self) -> None:
        base = BASE | {"constraint": "clip", "clipping": {"floor": 1.5}}
        assert set(problems_of(base, {"delta": [2.0, 1.0]})) == {"clipping.floor"}

    def test_numbers_too_large_are_told_their_own_limit(self) -> None:
        found = problems_of(BASE | {"lambda_ort": 1e308}, {"seed": [2**63]})
        assert found["base.lambda_ort"] == "must be at least 0 and below 1e301, not 1e+308"
        assert found["grid.seed[0]"] == f"must be at least 0 and at most {2**32 - 1}, not {2**63}"

    def test_a_network_that_cannot_take_the_images_is_named(self) -> None:
        wrong: list[tuple[dict[str, Any], str, str]] = [
            (
                {"dataset": "digits", "model": "lipconvnet-5"},
                "model",
                "cannot take the images of digits: image_size = 8",
            ),
            ({"dataset": "digits", "model": "small-cnn3d"}, "model", "images of 2 dimensions"),
            ({"dataset": "synthetic:1x8x8x8:2:20", "model": "small-cnn"}, "model", "images of 3 dimensions"),
            ({"dataset": "cifar10", "model": "small-cnn", "mean": [0.1, 0.2]}, "mean", "one per channel of cifar10, 3"),
            ({"dataset": "cifar10", "model": "small-cnn", "std": [0.5, 0.5]}, "std", "one per channel of cifar10, 3"),
            ({"dataset": "cifar10", "model": "torchvision:resnet81"}, "model", "torchvision has alexnet"),
            ({"dataset": "npz:mine", "model": "torchvision:resnet81"}, "model", "torchvision has alexnet"),
            ({"dataset": "npz:mine", "model": "torchvision:resnet18", "layer": "soc"}, "layer", "dense or tt"),
            ({"dataset": "cifar10", "model": "torchvision:alexnet"}, "model", "cannot take the images of cifar10"),
        ]
        for base, field, said in wrong:
            found = problems_of(base, {"seed": [0, 1]})
            assert set(found) == {field}
            assert said in found[field]
        for right in (
            {"dataset": "npz:mine", "model": "lipconvnet-5"},
            {"dataset": "digits", "model": "torchvision:resnet18", "layer": "tt", "rank": 0.25},
            {"dataset": "cifar10", "model": "torchvision:regnet_x_400mf"},  # whose widths are tensors
            {"dataset": "synthetic:1x8x8x8:2:20", "model": "small-cnn3d"},
            {"dataset": "cifar10", "model": "wrn10-1", "mean": [0.1, 0.2, 0.3], "std": [0.5]},
        ):
            assert len(expand(right).trials) == 1

    def test_a_kind_of_layer_without_such_a_convolution_is_named(self) -> None:
        """Before any worker has seen the spec: with the convolution that stands in the way."""
        for model, layers in {"resnet18": ("aoc", "aol-tt"), "small-cnn3d": ("soc", "bcop", "cayley-tt")}.items():
            data = "synthetic:1x8x8x8:2:20" if model == "small-cnn3d" else "cifar10"
            for layer in layers:
                base = {"dataset": data, "model": model, "rank": 4}
                found = problems_of(base, {"layer": ["dense", layer]})
                assert set(found) == {"layer"}
                assert f'not "{layer}"' in found["layer"]
                assert ("downsample.0 has 1x1 and stride 2" in found["layer"]) == (model == "resnet18")
        assert len(expand({"dataset": "cifar10", "model": "resnet18", "layer": "bcop"}).trials) == 1

    def test_so_is_a_rank_of_which_it_has_none(self) -> None:
        base = {"dataset": "cifar10", "model": "wrn10-1", "layer": "aoc-tt"}
        assert "layer2.0.conv1 has 1, not" in problems_of(base, {"rank": [4, 1]})["layer"]
        assert len(expand(base, {"rank": [4, 2]}).trials) == 2

    def test_few_networks_are_built_and_of_the_others_it_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        base, grid = {"dataset": "cifar10"}, {"model": ["small-cnn", "resnet18", "torchvision:alexnet"]}
        monkeypatch.setattr(planner, "_MOST_BUILT", 1)  # the first two are known without being built
        assert "cannot take the images" in problems_of(base, grid)["model"]
        monkeypatch.setattr(planner, "_MOST_BUILT", 0)
        spec = spec_of(base, grid)
        (said,) = planner.warnings(spec, expand_grid(spec, max_trials=3))
        assert said.startswith("grid.model: unlike the first 0, 1 network of torchvision could not be tried here: ")

    def test_what_needs_no_building_is_refused_of_every_network(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planner, "_MOST_BUILT", 0)
        base = {"dataset": "synthetic:3x64x64:10:100"}
        grid = {"model": ["torchvision:alexnet", "torchvision:alexnot"]}
        assert "torchvision has alexnet, " in problems_of(base, grid)["model"]
        found = problems_of(base | {"model": "torchvision:alexnet"}, {"layer": ["dense", "soc"]})
        assert found["layer"].startswith("must be dense or tt for networks of torchvision")

    def test_is_pure(self) -> None:
        spec = spec_of(BASE | {"training": {"epochs": 2}}, {"seed": [0, 1], "training.milestones": [[1], [2]]})
        before = spec.model_dump_json()
        assert expand_grid(spec, max_trials=10) == expand_grid(spec, max_trials=10)
        assert spec.model_dump_json() == before

    def test_cells_leave_the_seed_out(self) -> None:
        plan = expand(grid={"training.lr": [0.1, 0.2], "seed": [0, 1, 2]})
        assert len({planned.cell for planned in plan.trials}) == 2

    def test_a_thousand_trials_are_quick(self) -> None:
        start = time.process_time()
        assert len(expand(grid={"seed": list(range(1000))}).trials) == 1000
        assert time.process_time() - start < 2


class TestLimit:
    def test_the_limit_itself_is_allowed(self) -> None:
        assert expand(grid={"seed": list(range(12))}, most=12).points == 12

    def test_one_more_is_not(self) -> None:
        with pytest.raises(SpecError, match="grid: 13 = 13 points; at most 12 are allowed"):
            expand(grid={"seed": list(range(13))}, most=12)

    def test_an_enormous_grid_is_refused_by_arithmetic(self) -> None:
        axes: dict[str, list[Any]] = {
            name: list(range(1, 1001)) for name in ("seed", "rank", "training.epochs", "clipping.every")
        }

        def refused() -> None:
            with pytest.raises(SpecError, match=r"1000 x 1000 x 1000 x 1000 = 1000000000000 points; at most 20000"):
                expand(grid=axes, most=20_000)

        assert effort(refused) < 0.2

    def test_what_is_wrong_in_base_is_named_too(self) -> None:
        with pytest.raises(SpecError) as caught:
            expand(BASE | {"rank": 0}, {"seed": list(range(13))}, most=12)
        assert [problem.field for problem in caught.value.problems] == ["base.rank", "grid"]


class TestProblems:
    def test_every_wrong_field_is_named_at_once(self) -> None:
        found = problems_of(
            {"model": "vgg-99", "layers": "tt", "delta": -1.0, "training": {"lr": 0, "epoch": 5}, "clipping": 3},
            {"rank": [4, 0, "8"], "training.epochs": [], "colour": ["red"], "delta": [1.0]},
        )
        assert set(found) == {
            "base.dataset",
            "base.model",
            "base.layers",
            "base.delta",
            "base.training.lr",
            "base.training.epoch",
            "base.clipping",
            "grid.rank[1]",
            "grid.rank[2]",
            "grid.training.epochs",
            "grid.colour",
            "grid.delta",
        }
        assert found["base.dataset"] == (
            "is required, here, in every variant or as an axis; " + str(DatasetName().fix(None))
        )
        assert "small-cnn" in found["base.model"]
        assert found["base.delta"] == "must be above 0, or null, not -1.0"
        assert found["base.training.lr"] == "must be above 0, not 0"
        assert found["base.training.epoch"].startswith(
            "unknown; the nearest is training.epochs; the fields here are epochs, steps, batch_size"
        )
        assert found["base.clipping"] == "must be an object with every, rounds, rescale, operator, floor, linear"
        assert found["grid.rank[1]"] == (
            "must be a whole number of at least 1 and at most 1000000, or a fraction above 0 and below 1, "
            "or null, not 0"
        )
        assert found["grid.rank[2]"] == 'must be a whole number or a number or null, without quotes, not "8"'
        assert "empty" in found["grid.training.epochs"]
        assert found["grid.colour"].startswith("unknown; an axis is one of dataset, model")
        assert found["grid.delta"] == "is set in base too; remove it here or base.delta"

    @pytest.mark.parametrize(
        ("base", "where", "said"),
        [
            ({"traning": {"lr": 0.1}}, "base.traning", "unknown; the nearest is training; "),
            ({"Evaluation": {"attack": "pgd"}}, "base.Evaluation", "unknown; the nearest is evaluation; "),
            ({"lr": 0.1}, "base.lr", "unknown; the nearest is training.lr; "),
            ({"training": {"batchsize": 8}}, "base.training.batchsize", "; the nearest is training.batch_size; "),
            ({"training": {"every": 8}}, "base.training.every", "the nearest is clipping.every or division.every; "),
            ({"training.lr": 0.1}, "base.training.lr", "is a field of training here: write training: {lr: ...}"),
        ],
    )
    def test_the_nearest_name_is_one_that_can_stand_there(self, base: dict[str, Any], where: str, said: str) -> None:
        assert said in problems_of(BASE | base)[where]

    @pytest.mark.parametrize(
        "chooser",
        [
            {"scheduler": {"type": "asha"}},
            {"search": {"algorithm": "random", "trials": 4, "space": {"seed": {"choice": [0, 1]}}}},
        ],
    )
    def test_test_images_choose_no_trials(self, chooser: dict[str, Any]) -> None:
        """What a scheduler or a search looks at is the validation accuracy, then that of the test images."""
        for validation in ("held-out", "test"):
            base = BASE | {"training": {"validation": validation}}
            spec = ExperimentSpec.model_validate({"spec_version": 2, "name": "t", "base": base, **chooser})
            if validation == "held-out":
                expand_grid(spec, max_trials=10)
                continue
            with pytest.raises(SpecError) as caught:
                expand_grid(spec, max_trials=10)
            (problem,) = caught.value.problems
            assert problem.field == "training.validation"
            assert problem.message.startswith(f"must be held-out: `{next(iter(chooser))}` would choose among trials")

    def test_fp16_is_for_cards(self) -> None:
        """No processor trains in it in less than many times the time; what a search draws is looked at, too."""
        drawn = {"algorithm": "random", "trials": 9, "space": {"seed": {"choice": [0, 1]}}}
        for chooser in ({"grid": {"seed": [0, 1]}}, {"search": drawn}):
            for gpus in (0, 0.5):
                spec = {"spec_version": 2, "name": "t", "base": BASE | {"training": {"precision": "fp16"}}, **chooser}
                parsed = ExperimentSpec.model_validate(spec | {"resources": {"gpus": gpus}})
                if gpus:
                    expand_grid(parsed, max_trials=10)
                    continue
                with pytest.raises(SpecError) as caught:
                    expand_grid(parsed, max_trials=10)
                (problem,) = caught.value.problems
                assert problem.field == "training.precision"
                assert problem.message.startswith("must be float32 where resources.gpus is 0")

    def test_a_nested_field_conflicts_with_its_axis(self) -> None:
        found = problems_of(BASE | {"training": {"lr": 0.1}}, {"training.lr": [0.2]})
        assert found == {"grid.training.lr": "is set in base too; remove it here or base.training.lr"}

    @pytest.mark.parametrize("path", ["training", "training.", ".lr", "training.lr.x", "", "Seed", "seed "])
    def test_only_whole_paths_are_axes(self, path: str) -> None:
        assert set(problems_of(grid={path: [1]})) == {f"grid.{path}"}

    @pytest.mark.parametrize("name", ["training.lr", "clipping.every"])
    def test_base_is_nested_not_dotted(self, name: str) -> None:
        assert set(problems_of(BASE | {name: 1})) == {f"base.{name}"}

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), pytest.param(10**400, id="huge"), True, "1", [], {}])
    @pytest.mark.parametrize("path", ["rank", "lambda_ort", "seed", "delta"])
    def test_what_is_no_such_number_is_refused(self, path: str, value: object) -> None:
        assert set(problems_of(BASE | {path: value})) == {f"base.{path}"}
        assert set(problems_of(grid={path: [value]})) == {f"grid.{path}[0]"}

    @pytest.mark.parametrize("path", ["division.every", "clipping.every"])
    def test_whole_numbers_end_where_json_numbers_do(self, path: str) -> None:
        """Above 2^53 other readers of the same JSON see another number; above 2^63 no database holds it."""
        assert len(expand(BASE | {"layer": "tt"}, {path: [2**53 - 1]}).trials) == 1
        for value in (2**53, 2**63, 10**30, -(10**400)):
            assert set(problems_of(BASE | {"layer": "tt"}, {path: [value]})) == {f"grid.{path}[0]"}

    def test_a_long_value_is_shown_shortened(self) -> None:
        assert len(problems_of(grid={"seed": ["x" * 10_000]})["grid.seed[0]"]) < 200


class TestSpec:
    @pytest.mark.parametrize(
        ("change", "where"),
        [
            ({"name": ""}, ("name",)),
            ({"name": "x" * 201}, ("name",)),
            ({"name": "two\nlines"}, ("name",)),
            ({"name": "nul\0"}, ("name",)),
            ({"name": 3}, ("name",)),
            ({"notes": "nul\0"}, ("notes",)),
            ({"priority": 1001}, ("priority",)),
            ({"priority": 1.0}, ("priority",)),
            ({"priority": True}, ("priority",)),
            ({"max_concurrent_trials": 0}, ("max_concurrent_trials",)),
            ({"max_concurrent_trials": 10_001}, ("max_concurrent_trials",)),
            ({"order": "seeds-first"}, ("order",)),
            ({"order": None}, ("order",)),
            ({"preempt": "yes"}, ("preempt",)),
            ({"preempt": None}, ("preempt",)),
            ({"hung_after": 0.5}, ("hung_after",)),
            ({"hung_after": float("inf")}, ("hung_after",)),
            ({"hung_after": True}, ("hung_after",)),
            ({"resources": {"cpus": 0}}, ("resources", "cpus")),
            ({"resources": {"gpus": -0.5}}, ("resources", "gpus")),
            ({"resources": {"gpus": 1.5}}, ("resources", "gpus")),
            ({"resources": {"cpus": float("inf")}}, ("resources", "cpus")),
            ({"resources": {"tpus": 1}}, ("resources", "tpus")),
            ({"spec_version": 3}, ("spec_version",)),
            ({"seeds": [1]}, ("seeds",)),
            ({"grid": {"seed": 1}}, ("grid", "seed")),
            ({"grid": [1]}, ("grid",)),
            ({"base": []}, ("base",)),
        ],
    )
    def test_wrong_fields_are_refused(self, change: dict[str, Any], where: tuple[str, ...]) -> None:
        with pytest.raises(ValidationError) as caught:
            ExperimentSpec.model_validate({"name": "test", "base": BASE} | change)
        assert [error["loc"] for error in caught.value.errors()] == [where]

    def test_survives_its_own_storage(self) -> None:
        spec = ExperimentSpec(
            name="ü",
            base=BASE,
            grid={"seed": [1, 2], "delta": [None, 1.5]},
            priority=-3,
            order="seeds-last",
            preempt=True,
            hung_after=77.5,
        )
        assert ExperimentSpec.model_validate(spec.model_dump(mode="json")) == spec

    def test_a_spec_of_before_runs_as_it_did(self) -> None:
        """In the grid's order, uninterrupted, and hung only by its own pace."""
        old = ExperimentSpec.model_validate({"name": "old", "base": BASE})
        assert (old.order, old.preempt, old.hung_after) == ("grid", False, None)


def _accepted(base: dict[str, Any], grid: dict[str, list[Any]]) -> bool:
    try:
        expand(base, grid)
    except SpecError:
        return False
    return True


def _fits(spec: dict[str, Any]) -> bool:
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(spec))


_whole = st.one_of(
    st.integers(-2, 3),
    st.sampled_from([10**5, 10**5 + 1, 10**6 + 1, 2**32 - 1, 2**32, 2**53, 10**30, 10**400, -(10**400)]),
)
_fraction = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([0.5, 1.5, -0.5, 1e308]))
_text = st.one_of(st.sampled_from(["digits", "small-cnn", "tt", "clip", "sgd", "cosine", "none", "x"]), st.text())
_list = st.lists(st.integers(-1, 5), max_size=3)
_values = st.one_of(_whole, _fraction, _text, _list, st.booleans(), st.none(), st.just({}), st.just([1.5]))


class TestSchema:
    def test_is_a_schema(self) -> None:
        jsonschema.Draft202012Validator.check_schema(SCHEMA)

    def test_names_every_field(self) -> None:
        axes = SCHEMA["properties"]["grid"]["properties"]
        assert list(axes) == list(field_infos())
        base = SCHEMA["properties"]["base"]["properties"]
        nested = {
            f"{name}.{inner}" if "properties" in schema else name
            for name, schema in base.items()
            for inner in schema.get("properties", [name])
        }
        assert nested == set(field_infos())
        assert all(schema["description"] for schema in axes.values())

    @examples(400)
    @given(path=st.sampled_from(list(field_infos())), value=_values, axis=st.booleans())
    def test_agrees_with_what_is_accepted(self, path: str, value: object, axis: bool) -> None:
        info = field_infos()[path]
        if isinstance(value, float) and value.is_integer() and int in info.types:
            return  # to JSON Schema 2.0 is an integer; we ask for 2
        if isinstance(value, int | float) and abs(value) >= 1e301 and float in info.types:
            return  # at the end of the doubles, which JSON Schema does not know
        base: dict[str, Any] = {name: fixed for name, fixed in BASE.items() if name != path}
        grid: dict[str, list[Any]] = {name: [BASE[name]] for name in BASE if name == path and not axis}
        if axis:
            grid[path] = [value]
        else:
            grid = {}
            part, _, name = path.rpartition(".")
            base |= {part: {name: value}} if part else {name: value}
        fits = _fits({"name": "test", "base": base, "grid": grid})
        # What the schema cannot say: an order, and how many channels the images of another field have.
        beyond = isinstance(value, list) and {
            "training.milestones": value != sorted(set(value)),
            "mean": len(value) > 1,
            "std": len(value) > 1,
        }.get(path, False)
        assert _accepted(base, grid) == (fits and not beyond)

    def test_examples_of_what_it_refuses(self) -> None:
        refused: list[dict[str, Any]] = [
            {"base": {"colour": 1}},
            {"grid": {"seed": []}},
            {"grid": {"training": [1]}},
            {"priority": 1001},
        ]
        for wrong in refused:
            assert not _fits({"name": "test", "base": BASE} | wrong)
        assert _fits({"name": "test", "base": BASE, "grid": {"rank": [None, 8]}})


AXES: dict[str, list[Any]] = {
    "seed": [0, 1, 2, 3],
    "layer": ["dense", "tt", "soc"],
    "rank": [None, 1, 2.0, 2, 0.5],
    "lambda_ort": [0, 0.0, 0.1],
    "constraint": ["none", "clip", "divide"],
    "delta": [None, 1, 1.0, 2.0],
    "clipping.floor": [None, 1.5],
    "training.lr": [0.1, 1, 1.0],
    "training.nesterov": [True, False],
    "evaluation.attack": ["none", "pgd"],
}
"""Values of which some are the same, some have no effect, and some do not go together."""


def _some(path: str) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(AXES[path]), min_size=1, max_size=3)


@st.composite
def _partials(draw: st.DrawFn, paths: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in paths:
        part, _, name = path.rpartition(".")
        (found.setdefault(part, {}) if part else found)[name] = draw(st.sampled_from(AXES[path]))
    return found


def _refused_or(function: Callable[..., Any], spec: ExperimentSpec) -> Any:
    try:
        return function(spec, max_trials=5000)
    except SpecError as error:
        return error.problems


@given(st.data())
def test_counting_is_expanding(data: st.DataObject) -> None:
    """The same trials, cells, idle fields and refusals, of any spec."""
    paths = data.draw(st.lists(st.sampled_from(sorted(AXES)), unique=True, max_size=6))
    cut = data.draw(st.integers(0, len(paths)))
    free = st.lists(st.sampled_from(paths[cut:] or ["seed"]), unique=True)
    spec = ExperimentSpec(
        name="x",
        base=BASE,
        grid={path: data.draw(_some(path)) for path in paths[:cut]},
        variants=data.draw(st.lists(free.flatmap(_partials), max_size=2)),
        trials=data.draw(st.lists(free.flatmap(_partials), max_size=2)),
        repeat=data.draw(st.sampled_from([1, 1, 3])),
    )
    plan, tally = _refused_or(expand_grid, spec), _refused_or(count_grid, spec)
    if not isinstance(plan, Plan):
        assert tally == plan
        return
    assert isinstance(tally, GridCount)
    assert (tally.points, tally.idle, tally.trials) == (plan.points, plan.idle, len(plan.trials))
    counts = Counter(planned.cell for planned in plan.trials)
    assert {cell.config.cell(): cell.trials for cell in tally.cells} == counts


@pytest.mark.parametrize("name", ["cpus", "gpus"])
def test_a_share_that_ray_cannot_count_is_refused(name: str) -> None:
    def spec(share: float) -> ExperimentSpec:
        base = {"dataset": "digits", "model": "small-cnn"}
        return ExperimentSpec.model_validate({"name": "test", "base": base, "resources": {name: share}})

    for look in (expand_grid, count_grid):
        with pytest.raises(SpecError) as caught:
            look(spec(0.00009), max_trials=10)
        assert [problem.field for problem in caught.value.problems] == [f"resources.{name}"]
        assert look(spec(0.0001), max_trials=10).points == 1
