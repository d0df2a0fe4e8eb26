"""A reading of all chips by calls of libdcmi.so. Runs in a child process only.

Heat, memory and load are asked at every reading, the rest every 30 s. Knows which of two calls a
family of chips answers, and units.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_uint
from typing import Any, TypeVar

from rank_worker.device_sensors import dcmi_library as dcmi
from rank_worker.device_sensors.dcmi_library import DcmiLibrary
from rank_worker.device_sensors.reading import (
    HEALTH_WORDS,
    CardReading,
    ChipReading,
    NodeReading,
    plausible_celsius,
    plausible_ratio,
)
from rank_worker.device_sensors.smi_parser import REMEDIES
from rank_worker.device_sensors.source import SensorError, taken_now

T = TypeVar("T")
S = TypeVar("S", bound=ctypes.Structure | ctypes.Union)

NAME = "dcmi"
MIB = 1 << 20
RARE_S = 30.0
AI_CORE, DDR_BANDWIDTH, HBM_BANDWIDTH = 2, 5, 10  # kinds of utilisation
DDR, HBM = 0, 2  # kinds of memory with ECC
THERMAL_THRESHOLD = 9
RESET = 1  # of the two thresholds


class DcmiReader:
    """read() after a library that was loaded; initialises it until that succeeds."""

    def __init__(self, library: DcmiLibrary, clock: Callable[[], float] = time.monotonic) -> None:
        self._library = library
        self._clock = clock
        self._ready = False
        self._rare: dict[object, tuple[float, Any]] = {}

    def read(self) -> NodeReading:
        """Chips that answer; a reading with an error when there are none."""
        try:
            if not self._ready:
                self._demand("dcmi_init")
                self._ready = True
            keys = self._rarely("keys", self._keys)
        except SensorError as failure:
            return taken_now(NAME, error=str(failure))
        chips = tuple(self._chip(*key) for key in keys)
        cards = tuple(self._card(npu_id) for npu_id in sorted({npu_id for npu_id, _ in keys}))
        if not chips:
            error = "DCMI lists no chip; look at `lspci -d 19e5:` and `dmesg`"
        elif all(chip.temperature_celsius is None for chip in chips):
            error = f"DCMI lists {len(chips)} chips and none tells its temperature; look at `dmesg`"
        else:
            return taken_now(NAME, chips, cards)
        return taken_now(NAME, error=error)

    def _keys(self) -> tuple[tuple[int, int], ...]:
        """(card, chip) of every chip; the controller of a board is none."""
        count, numbers = c_int(), (c_int * dcmi.MAX_CARDS)()
        arguments = (byref(count), numbers, dcmi.MAX_CARDS)
        if self._library.call("dcmi_get_card_list", *arguments) != 0:
            self._demand("dcmi_get_card_num_list", *arguments)
        cards = numbers[: max(0, min(count.value, dcmi.MAX_CARDS))]
        return tuple((card, chip) for card in cards for chip in range(self._num_chips(card)))

    def _num_chips(self, card: int) -> int:
        count, controller, processor = c_int(), c_int(), c_int()
        pointers = (byref(count), byref(controller), byref(processor))
        if self._library.call("dcmi_get_device_id_in_card", card, *pointers) == 0:
            return count.value
        return self._number("dcmi_get_device_num_in_card", card) or 0

    def _chip(self, card: int, chip: int) -> ChipReading:
        key = card, chip
        used, total, has_hbm = self._memory(card, chip)
        ecc = self._rarely(("ecc", key), lambda: self._ecc(card, chip, HBM if has_hbm else DDR))
        bandwidth = HBM_BANDWIDTH if has_hbm else DDR_BANDWIDTH
        health = self._number("dcmi_get_device_health", card, chip)
        return ChipReading(
            card,
            chip,
            device_index=self._rarely(("index", key), lambda: self._index(card, chip)),
            bus_id=self._rarely(("bus", key), lambda: self._bus_id(card, chip)),
            temperature_celsius=plausible_celsius(
                self._number("dcmi_get_device_temperature", card, chip)
            ),
            memory_used_bytes=used,
            memory_total_bytes=total,
            core_utilisation_ratio=self._utilisation(card, chip, AI_CORE),
            bandwidth_utilisation_ratio=self._utilisation(card, chip, bandwidth),
            health=dict(enumerate(HEALTH_WORDS)).get(-1 if health is None else health),
            error_codes=self._rarely(("codes", key), lambda: self._error_codes(card, chip)),
            ecc_enabled=None if ecc is None else bool(ecc.enabled),
            ecc_single_bit=None if ecc is None else ecc.single_bit,
            ecc_double_bit=None if ecc is None else ecc.double_bit,
            shutdown_celsius=self._rarely(("limit", key), lambda: self._limit(card, chip)),
            processes=self._rarely(("processes", key), lambda: self._processes(card, chip)),
        )

    def _card(self, card: int) -> CardReading:
        tenths = self._number("dcmi_mcu_get_power_info", card)
        name = self._rarely(("name", card), lambda: self._name(card))
        return CardReading(card, None if tenths is None or tenths <= 0 else tenths / 10, name)

    def _memory(self, card: int, chip: int) -> tuple[int | None, int | None, bool]:
        """Used and total bytes, and whether they are HBM's, which a 310P does not have."""
        hbm = self._filled("dcmi_get_device_hbm_info", dcmi.HbmInfo, card, chip)
        if hbm is not None and hbm.size:
            used, size = hbm.used, hbm.size
        else:
            ddr = self._filled("dcmi_get_device_memory_info_v3", dcmi.MemoryInfo, card, chip)
            if ddr is None or not ddr.size:
                return None, None, False
            used, size = ddr.size - ddr.available, ddr.size
        has_hbm = hbm is not None and bool(hbm.size)
        return (used * MIB if 0 <= used <= size else None), size * MIB, has_hbm

    def _utilisation(self, card: int, chip: int, kind: int) -> float | None:
        return plausible_ratio(self._number("dcmi_get_device_utilization_rate", card, chip, kind))

    def _ecc(self, card: int, chip: int, kind: int) -> Any:
        return self._filled("dcmi_get_device_ecc_info", dcmi.EccInfo, card, chip, kind)

    def _error_codes(self, card: int, chip: int) -> tuple[str, ...] | None:
        count, codes = c_int(), (c_uint * dcmi.MAX_CODES)()
        call = "dcmi_get_device_errorcode_v2"
        if self._library.call(call, card, chip, byref(count), codes, dcmi.MAX_CODES) != 0:
            return None
        return tuple(f"{code:08X}" for code in codes[: max(0, min(count.value, dcmi.MAX_CODES))])

    def _limit(self, card: int, chip: int) -> float | None:
        info = self._filled(
            "dcmi_get_device_sensor_info", dcmi.SensorInfo, card, chip, THERMAL_THRESHOLD
        )
        return None if info is None else plausible_celsius(float(info.celsius[RESET]))

    def _processes(self, card: int, chip: int) -> tuple[tuple[int, int], ...] | None:
        count, found = c_int(), (dcmi.ProcessInfo * dcmi.MAX_PROCESSES)()
        call = "dcmi_get_device_resource_info"
        if self._library.call(call, card, chip, found, byref(count)) != 0:
            return None
        listed = found[: max(0, min(count.value, dcmi.MAX_PROCESSES))]
        return tuple((process.pid, process.used_bytes) for process in listed)

    def _bus_id(self, card: int, chip: int) -> str | None:
        at = self._filled("dcmi_get_device_pcie_info_v2", dcmi.PcieInfo, card, chip)
        if at is None:
            return None
        return f"{at.domain:04X}:{at.bus:02X}:{at.slot:02X}.{at.function:X}"

    def _index(self, card: int, chip: int) -> int | None:
        index = c_int()
        code = self._library.call("dcmi_get_device_logic_id", byref(index), card, chip)
        return index.value if code == 0 and index.value >= 0 else None

    def _name(self, card: int) -> str | None:
        info = self._filled("dcmi_get_device_chip_info", dcmi.ChipInfo, card, 0)
        return None if info is None else info.chip_name.decode("ascii", "replace") or None

    def _number(self, symbol: str, *arguments: int) -> int | None:
        """A call whose last argument is where one number goes."""
        out = dcmi.SIGNATURES[symbol][-1]._type_()
        return out.value if self._library.call(symbol, *arguments, byref(out)) == 0 else None

    def _filled(self, symbol: str, kind: type[S], *arguments: int) -> S | None:
        """A call whose last argument is where a structure goes."""
        out = kind()
        pointer: Any = byref(out)
        return out if self._library.call(symbol, *arguments, pointer) == 0 else None

    def _rarely(self, key: object, ask: Callable[[], T]) -> T:
        """The answer of at most RARE_S ago. A list of chips that fails is not kept."""
        known = self._rare.get(key)
        if known is None or self._clock() - known[0] >= RARE_S:
            self._rare[key] = known = (self._clock(), ask())
        answer: T = known[1]
        return answer

    def _demand(self, symbol: str, *arguments: Any) -> None:
        code = self._library.call(symbol, *arguments)
        if code is None:
            raise SensorError(f"libdcmi.so has no {symbol}; update the driver")
        if code:
            remedy = REMEDIES.get(str(code), "look at `dmesg` and run `npu-smi info`")
            raise SensorError(f"{symbol} returned {code}; {remedy}")
