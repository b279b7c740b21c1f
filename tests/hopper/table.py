"""The committed table of compiled kernels, `kernels.json`: what each came to in each case.

settle({("paged_attention", "decode"): kernel, ...}, write=write_kernels)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from target import SHARED_MEMORY, Kernel

TABLE = Path(__file__).with_name("kernels.json")
REGISTERS_TOLERANCE = 24
"""Registers a thread by which two versions of ptxas may differ; they come in steps of 8."""
MAX_REGISTERS = 255
"""Of a thread of any kernel on compute capability 9.0."""

Entry = dict[str, int]
Entries = dict[str, Entry]
"""By "kernel, case"."""


def settle(measured: Mapping[tuple[str, str], Kernel], *, write: bool, path: Path = TABLE) -> None:
    """Compares what was measured of some kernels, all cases of each, with the table; or puts it
    there, in place of what the table says of these kernels."""
    entries = entries_of(measured)
    wrong = limits(entries)
    table = json.loads(path.read_text())
    names = {kernel for kernel, _ in measured}
    committed = {key: entry for key, entry in table.items() if key.split(", ")[0] in names}
    if write and not wrong:
        kept = {key: entry for key, entry in table.items() if key not in committed}
        path.write_text(json.dumps(dict(sorted((kept | entries).items())), indent=2) + "\n")
    elif not write:
        wrong += differences(entries, committed)
    if wrong:
        raise AssertionError("\n".join(wrong))


def entries_of(measured: Mapping[tuple[str, str], Kernel]) -> Entries:
    """Kernels as the table has them."""
    return {
        f"{kernel}, {case}": {k: v for k, v in found._asdict().items() if k != "name"}
        for (kernel, case), found in measured.items()
    }


def limits(entries: Entries) -> list[str]:
    """What no kernel may do, whatever the table says."""
    wrong = []
    for key, entry in entries.items():
        if entry["spills"]:
            wrong.append(f"{key}: spills {entry['spills']} bytes of registers")
        if entry["registers"] > MAX_REGISTERS:
            wrong.append(f"{key}: {entry['registers']} registers")
        if entry["shared_memory"] > SHARED_MEMORY:
            wrong.append(f"{key}: {entry['shared_memory']} bytes of shared memory")
    return wrong


def differences(measured: Entries, committed: Entries) -> list[str]:
    """Where measured entries depart from the committed ones. Spills, shared memory and whether
    wgmma and TMA are used must agree; registers may differ by REGISTERS_TOLERANCE, and a compiler
    is free to unroll, so the number of instructions may differ."""
    wrong = [f"{key}: not in the table" for key in measured.keys() - committed.keys()]
    wrong += [f"{key}: in the table only" for key in committed.keys() - measured.keys()]
    for key in measured.keys() & committed.keys():
        new, old = measured[key], committed[key]
        for field in ("spills", "shared_memory"):
            if new[field] != old[field]:
                wrong.append(f"{key}: {field} {old[field]} -> {new[field]}")
        for field in ("wgmma", "tma"):
            if bool(new[field]) != bool(old[field]):
                wrong.append(f"{key}: {field} {old[field]} -> {new[field]}")
        if abs(new["registers"] - old["registers"]) > REGISTERS_TOLERANCE:
            wrong.append(f"{key}: registers {old['registers']} -> {new['registers']}")
    return sorted(wrong)
