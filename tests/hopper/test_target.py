"""The checks themselves: a good kernel passes, and each way of failing is seen."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
import table
import target
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding, PartitionSpec

TRANSFORMS = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


def products(a, b, *, sums):
    """`sums` different sums of products a @ b, all in registers: [64, 128] in float32 takes 64 of
    the 255 registers of each thread, so more than three do not fit."""
    shape = (a.shape[0], b.shape[1])

    def product_kernel(a_ref, b_ref, out_ref, a_smem, b_smem, barrier):
        plgpu.copy_gmem_to_smem(a_ref, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_ref, b_smem, barrier)
        plgpu.barrier_wait(barrier)

        def product(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        def add(_, carry):
            accumulator = plgpu.ACC(shape, jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
            new = pl.run_scoped(product, accumulator)
            return tuple(x * (i + 2.0) + new for i, x in enumerate(carry))

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        out_ref[...] = sum(jax.lax.fori_loop(0, 8, add, (zero,) * sums))

    tiles = [plgpu.SMEM(x.shape, x.dtype, transforms=TRANSFORMS) for x in (a, b)]
    return plgpu.kernel(
        product_kernel,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=[*tiles, plgpu.Barrier(num_arrivals=2)],
    )(a, b)


def compiled(sums, columns):
    mesh = target.mesh(1)
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = [
        jax.ShapeDtypeStruct((64, n), jnp.bfloat16, sharding=everywhere) for n in (64, columns)
    ]
    return target.compile_for(mesh, functools.partial(products, sums=sums), arguments)


def test_a_kernel_is_read_from_its_dump_and_its_second_call_leaves_none():
    program = compiled(sums=1, columns=128)
    (kernel,) = program.kernels
    assert (kernel.name, kernel.spills) == ("product_kernel", 0)
    assert 64 < kernel.registers <= 168
    operands = (64 * 64 + 64 * 128) * 2
    assert operands < kernel.shared_memory < operands + 1024
    assert (kernel.wgmma, kernel.tma) == (4, 2)  # 16 of 64 values of a product at a time
    assert program.mosaic_calls == 1
    again = compiled(sums=1, columns=128)
    assert (again.kernels, again.mosaic_calls) == ((), 1)


def test_spills_are_seen():
    (kernel,) = compiled(sums=6, columns=128).kernels
    assert kernel.spills > 0
    assert "spills" in table.limits(table.entries_of({("product", "six"): kernel}))[0]


def test_a_missing_dump_is_an_error(monkeypatch):
    monkeypatch.setattr(target, "_dumping_to", lambda _: contextlib.nullcontext())
    with pytest.raises(AssertionError, match="1 new Mosaic kernels, 0 ptxas logs"):
        compiled(sums=2, columns=64)


PTXAS = """\
ptxas info    : Function properties for k_mosaic_gpu_kernel
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 90 registers, used 2 barriers, 16 bytes smem
"""
PTX = ".target sm_90a\n.visible .entry k_mosaic_gpu_kernel(\n wgmma.mma_async;\n"
MLIR = "%1 = gpu.launch async [%0] blocks(%a) dynamic_shared_memory_size %c1024_i32 {\n"


@pytest.mark.parametrize("missing", ["", "spill", "Used", "sm_90a", "entry", "dynamic"])
def test_a_dump_that_lacks_something_is_an_error(tmp_path, missing):
    for suffix, text in ((".ptxas", PTXAS), (".ptx", PTX), (".mlir-passes.log", MLIR)):
        broken = text.replace(missing, "no") if missing else text
        (tmp_path / "k").with_suffix(suffix).write_text(broken)
    if not missing:
        found = target.read_dump(tmp_path / "k.ptxas")
        assert found == target.Kernel("k", 90, 1040, spills=12, wgmma=1, tma=0)
        return
    with pytest.raises(AssertionError):
        target.read_dump(tmp_path / "k.ptxas")


GOOD = target.Kernel("k", registers=168, shared_memory=1000, spills=0, wgmma=4, tma=2)


def test_the_table_takes_what_is_written_and_keeps_the_other_kernels(tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text("{}\n")
    table.settle({("a", "one"): GOOD, ("a", "two"): GOOD}, write=True, path=path)
    table.settle({("b", "one"): GOOD}, write=True, path=path)
    table.settle({("a", "two"): GOOD}, write=True, path=path)
    table.settle({("a", "two"): GOOD}, write=False, path=path)
    table.settle({("b", "one"): GOOD._replace(registers=176, wgmma=8)}, write=False, path=path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"registers": 200}, "registers 168 -> 200"),
        ({"shared_memory": 1001}, "shared_memory 1000 -> 1001"),
        ({"wgmma": 0}, "wgmma 4 -> 0"),
        ({"tma": 0}, "tma 2 -> 0"),
        ({"spills": 4}, "spills 4 bytes"),
    ],
)
def test_a_difference_from_the_table_is_an_error(tmp_path, change, complaint):
    path = tmp_path / "kernels.json"
    path.write_text("{}\n")
    table.settle({("a", "one"): GOOD}, write=True, path=path)
    with pytest.raises(AssertionError, match=complaint):
        table.settle({("a", "one"): GOOD._replace(**change)}, write=False, path=path)
    with pytest.raises(AssertionError, match="a, one: in the table only"):
        table.settle({("a", "two"): GOOD}, write=False, path=path)


def test_a_kernel_that_spills_is_not_written(tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text("{}\n")
    with pytest.raises(AssertionError, match="spills"):
        table.settle({("a", "one"): GOOD._replace(spills=4)}, write=True, path=path)
    assert path.read_text() == "{}\n"


def test_instructions_are_read_from_hlo():
    text = """
%fused_scatter.1 (p: bf16[4,2]) -> bf16[4,2] {
  ROOT %s = bf16[4,2]{1,0} scatter(%p, %i, %u), metadata={op_name="jit(f)/commit"}
}
ENTRY %main (a: bf16[4,2]) -> bf16[4,2] {
  %f = (bf16[4,2]{1,0}, f32[]) fusion(%a), kind=kInput, calls=%fused_scatter.1
  %g = ((f32[8]{0}), f32[64]{0}) all-gather-start(%b), dimensions={0}
  ROOT %h = f32[64]{0} all-gather-done(%g)
}
"""
    assert target.instructions(text) == [
        target.Instruction("scatter", "bf16", (4, 2), "jit(f)/commit", fused=True),
        target.Instruction("fusion", "bf16", (4, 2), "", fused=False),
        target.Instruction("fusion", "f32", (), "", fused=False),
        target.Instruction("all-gather", "f32", (64,), "", fused=False),
    ]
