"""Signing of directory entries with the keys of a job, and the facts about signers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from anabranch.transport.frame import pack
from anabranch.transport.network.certificates import check_keys, job_and_role

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey, EllipticCurvePublicKey

__all__ = ["NotSigned", "SignedEntry", "Signer", "SigningIdentity"]

_PURPOSE = "anabranch directory entry, version 1"


class NotSigned(Exception):
    """A certificate or a signature is invalid; gives the reason."""


class SignedEntry(msgspec.Struct, frozen=True, array_like=True):
    """An announcement; times are milliseconds since the epoch."""

    endpoint: str
    issued: int
    expires: int
    certificate: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Signer:
    """Facts of a certificate of our authority."""

    owner: str
    job: str
    role: str
    valid_from: datetime
    valid_until: datetime
    key: EllipticCurvePublicKey

    def check(self, entry: SignedEntry, uid: str, space: str) -> None:
        """Raise ``NotSigned`` unless its key signed ``entry`` for that name."""
        from cryptography.exceptions import InvalidSignature

        text = _signed_text(space, uid, entry.endpoint, entry.issued, entry.expires)
        try:
            self.key.verify(entry.signature, text, _algorithm())
        except InvalidSignature:
            raise NotSigned("its signature was not made with its certificate's key") from None


class SigningIdentity:
    """The certificate and key of a role, for signing, and the authority that issued them.

    Args:
        keys: the directory of certificates.
        role: whose they are.

    Attributes:
        job: that the certificate names; ``"*"`` is every one.
        owner: the certificate's SHA-256.
        authority: the certificate that signed it.

    Raises:
        ValueError: keys that are missing, damaged or open to others.
        ModuleNotFoundError: without ``cryptography``.
    """

    def __init__(self, keys: Path, role: str) -> None:
        _need_cryptography()
        check_keys(keys, role)
        self.role = role
        self._key, certificate = _load(keys / f"{role}.pem")
        self.authority = _authority_of(certificate, keys / "authority.pem")
        self._certificate = _der(certificate)
        self.owner = hashlib.sha256(self._certificate).hexdigest()
        names = job_and_role(_uris(certificate))
        if names is None:
            raise ValueError(
                f"{keys / role}.pem names no job; make new certificates with: anabranch keys DIR --job NAME"
            )
        self.job = names[0]

    def space(self, job: str) -> str:
        """Return the name of the space for entries of ``job``; authorities do not share one."""
        return f"{{anabranch:{hashlib.sha256(_der(self.authority)).hexdigest()[:16]}:{job}}}"

    def sign(self, uid: str, endpoint: str, issued: int, expires: int) -> bytes:
        """Return the entry that announces ``uid`` in the space of our job."""
        signed = _signed_text(self.space(self.job), uid, endpoint, issued, expires)
        return pack(SignedEntry(endpoint, issued, expires, self._certificate, self._key.sign(signed, _algorithm())))

    def signer_of(self, der: bytes) -> Signer:
        """Return the facts in a certificate of our authority.

        Raises:
            NotSigned: it is not one.
        """
        return _signer_of(der, self.authority)


def _signed_text(space: str, uid: str, endpoint: str, issued: int, expires: int) -> bytes:
    return pack((_PURPOSE, space, uid, endpoint, issued, expires))


def _need_cryptography() -> None:
    if find_spec("cryptography") is None:
        raise ModuleNotFoundError(
            "signing entries of a directory needs cryptography: pip install 'anabranch[redis]'", name="cryptography"
        )


def _load(path: Path) -> tuple[EllipticCurvePrivateKey, x509.Certificate]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        text = path.read_bytes()
        key, certificate = load_pem_private_key(text, password=None), x509.load_pem_x509_certificate(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}; make it again with: anabranch keys DIR") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} does not hold a key written by `anabranch keys`")
    return key, certificate


def _authority_of(certificate: x509.Certificate, path: Path) -> x509.Certificate:
    """Return the certificate in ``path`` that signed ``certificate``."""
    from cryptography import x509

    try:
        authorities = x509.load_pem_x509_certificates(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; make it again with: anabranch keys DIR") from None
    for authority in authorities:
        if _is_issued_by(certificate, authority):
            return authority
    raise ValueError(f"{path} did not sign the certificates beside it; copy both from the same directory of keys")


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _signer_of(der: bytes, authority: x509.Certificate) -> Signer:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        certificate = x509.load_der_x509_certificate(der)
        key = certificate.public_key()
        names = job_and_role(_uris(certificate))
    except Exception:  # noqa: BLE001 - untrusted bytes, in a parser that raises many kinds
        raise NotSigned("it has no certificate") from None
    if not _is_issued_by(certificate, authority):
        raise NotSigned("its certificate is not from this job's authority")
    if names is None or not isinstance(key, ec.EllipticCurvePublicKey):
        raise NotSigned("its certificate names no job and role")
    return Signer(
        hashlib.sha256(der).hexdigest(),
        *names,
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        key,
    )


def _uris(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return list(names.get_values_for_type(x509.UniformResourceIdentifier))


def _der(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.DER)


def _algorithm() -> ECDSA:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(hashes.SHA256())
