"""Signatures of entries, as minisign makes them. They say who wrote an entry; a sha256 does not.

The manifest is signed, which holds the key and the sha256 of every file. A remote level
requires signatures when its URL names a public key, `s3://bucket/kernels#minisign=RWQ...`, as the
second line of a `minisign.pub` gives it; several are separated by commas. Needs py-minisign.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nmm_compiler.errors import CacheError, CacheTrustError, MissingPackageError

_MARK = "#minisign="


def split_url(url: str) -> tuple[str, Trusted | None]:
    """Return the URL without the public keys it names, and the keys (None: none are required)."""
    plain, mark, keys = url.partition(_MARK)
    return plain, Trusted(keys) if mark else None


class Trusted:
    """Public keys, of which one must have signed; text separated by commas."""

    def __init__(self, keys: str) -> None:
        minisign = _minisign()
        self._keys = []
        for text in keys.split(","):
            try:
                self._keys.append(minisign.PublicKey.from_base64(text.strip()))
            except ValueError as error:
                raise CacheError(
                    f"{text.strip()!r:.80} is no minisign public key ({error}); pass the second "
                    "line of the file that `minisign -G` wrote, RW..."
                ) from None

    def check(self, manifest: bytes, signature: bytes | None, where: str) -> None:
        """Raise CacheTrustError unless one of the keys signed these bytes."""
        if signature is None:
            raise CacheTrustError(f"{where} is not signed and a signature is required")
        minisign = _minisign()
        reason = ""
        for key in self._keys:
            try:
                key.verify(manifest, minisign.Signature.from_bytes(signature))
            except ValueError as error:  # minisign's own errors are ValueErrors
                reason = str(error)
            else:
                return
        raise CacheTrustError(f"{where} is not signed by a key that is trusted: {reason}")


class Signer:
    """A minisign secret key in a file; `password` opens it when it is encrypted."""

    def __init__(self, path: Path, password: str | None = None) -> None:
        try:
            self._key = _minisign().SecretKey.from_file(path)
            if self._key.is_encrypted():
                if password is None:
                    raise ValueError("it is encrypted and no password was given")
                self._key.decrypt(password)
        except (OSError, ValueError) as error:
            raise CacheError(
                f"{path} cannot be used as a minisign secret key: {error}; `minisign -G -W` makes "
                "one without a password"
            ) from None

    def sign(self, digest: str, manifest: bytes) -> bytes:
        """Return the signature; the same bytes for the same manifest."""
        comment = f"nmm_compiler cache entry {digest}"
        return bytes(self._key.sign(manifest, trusted_comment=comment))


def _minisign() -> Any:
    try:
        import minisign
    except ImportError:
        raise MissingPackageError("py-minisign", "signing of cache entries", "signing") from None
    return minisign
