"""Which block every parameter belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .sums import Key


class Plan:
    """Blocks by parameter name, settled from the uses of one forward pass.

    Args:
        uses: per use of a layer its parameters by role, whether they are units, and whether weight
            and bias may share a block.
        plain: parameters to be held as diagonals, with the reason where there is one.
        joint: whether weight and bias of a layer share a block.
        remarks: what is to be said of parameters that have a block of their layer.
    """

    def __init__(
        self,
        uses: Sequence[tuple[Mapping[str, str | None], str, bool]],
        plain: Mapping[str, str],
        joint: bool,
        remarks: Mapping[str, str] | None = None,
    ) -> None:
        self.plain = dict(plain)
        #: what `coverage` says of a parameter
        self.reasons = {**(remarks or {}), **{n: why for n, why in self.plain.items() if why}}
        partners: dict[str, set[str | None]] = {}
        for names, _, together in uses:
            weight, bias = names.get("weight"), names.get("bias")
            for one, other in ((weight, bias), (bias, weight)):
                if one is not None:
                    partners.setdefault(one, set()).add(other if together and joint else None)
        self._blocks: dict[str, Key] = {}
        for names, kind, _ in uses:
            weight = self._free(names.get("weight"))
            bias = self._free(names.get("bias"))
            alone = any(
                n is not None and partners[n] != {m} for n, m in ((weight, bias), (bias, weight))
            )
            if kind == "units":
                self._enter_units(weight, bias, alone)
            elif weight is not None and bias is not None and not alone:
                self._enter(Key("kronecker", (weight, bias)))
            else:
                if weight is not None:
                    self._enter(Key("kronecker", (weight,)))
                if bias is not None:
                    self._enter(Key("kronecker", (bias,), bias=True))
        for name in self.plain:
            self._blocks[name] = Key("diagonal", (name,))

    @property
    def keys(self) -> list[Key]:
        """The blocks, each once."""
        return list(dict.fromkeys(self._blocks.values()))

    def _free(self, name: str | None) -> str | None:
        return None if name in self.plain else name

    def _enter(self, key: Key) -> None:
        for name in key.names:
            self._blocks.setdefault(name, key)

    def _enter_units(self, weight: str | None, bias: str | None, alone: bool) -> None:
        names = [n for n in (weight, bias) if n is not None]
        if not names:
            return
        for key in (
            [Key("units", (n,), bias=n == bias) for n in names]
            if alone
            else [Key("units", tuple(names), bias=weight is None)]
        ):
            self._enter(key)

    def weight(self, names: Mapping[str, str | None]) -> Key | None:
        """The block of a layer's weight, if it is a Kronecker one."""
        key = self._blocks.get(names.get("weight") or "")
        return key if key is not None and key.kind == "kronecker" else None

    def bias(self, names: Mapping[str, str | None]) -> Key | None:
        """The block of a layer's bias, if it is one by itself."""
        key = self._blocks.get(names.get("bias") or "")
        return key if key is not None and key.kind == "kronecker" and key.bias else None

    def units(self, names: Mapping[str, str | None]) -> list[tuple[Key, list[str]]]:
        """The blocks of gain and shift, each with the roles it holds."""
        roles: dict[Key, list[str]] = {}
        for role, name in names.items():
            key = self._blocks.get(name or "")
            if key is not None and key.kind == "units":
                roles.setdefault(key, []).append(role)
        return list(roles.items())

    def key(self, name: str) -> Key | None:
        """The block of a parameter."""
        return self._blocks.get(name)
