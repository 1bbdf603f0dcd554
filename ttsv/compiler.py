"""Machine code by LLVM; torch-free, as it is made in a process of its own."""

import base64
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import binding

from ttsv import product_code, tile_code


class Kind(NamedTuple):
    """Of functions: what writes their code in LLVM's language, and how many addresses and whole numbers they take."""

    code: Callable[..., str]
    addresses: int
    numbers: int


KINDS = {
    "product": Kind(product_code.code_of_product, len(product_code.ADDRESSES), len(product_code.NUMBERS)),
    "transform": Kind(tile_code.code_of_transform, len(tile_code.ADDRESSES), len(tile_code.NUMBERS)),
}


def main() -> None:
    """Reads arguments of `machine_code` as JSON, and writes what it makes of each."""
    made = [machine_code(*function) for function in json.load(sys.stdin)]
    json.dump([base64.b64encode(code).decode() for code in made], sys.stdout)


def processor() -> Any:
    """This processor."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )


def machine_code(kind: str, *arguments: Any) -> bytes:
    """An object file with the function "compute", of a kind of `KINDS`."""
    machine = processor()
    made: bytes = machine.emit_object(optimised(KINDS[kind].code(*arguments), machine))
    return made


def optimised(text: str, machine: Any) -> Any:
    """LLVM's module of a text in its language, for a machine."""
    module = binding.parse_assembly(text)
    module.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(module, passes)
    return module
