"""Certificates for TCP: a private authority, a certificate for each role, and TLS 1.3 checked on both sides.

Host names mean little in a job whose machines come and go, so a certificate names a job and a role instead (a URI such
as ``anabranch:nightly/experts``), and each side checks the other's. Jobs of one authority do not trust each other; the
job ``*`` stands for all of them. The authority's private key is needed again only to make more certificates; keep
``authority.key`` where no server runs.
"""

from __future__ import annotations

import os
import re
import shlex
import ssl
import stat
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

ROLES = ("worker", "parameters", "experts", "directory")
"""The roles a certificate may name."""

KEYS_VARIABLE = "ANABRANCH_KEYS"
"""The environment variable that names the directory of keys where none is given."""

EVERY_JOB = "*"
"""The job of a certificate that is valid for all jobs of its authority."""

_URI = "anabranch:"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}|\*")
_NAMES = re.compile(rf"{_URI}({_JOB.pattern})/({'|'.join(ROLES)})")
_URI_TAG = 0x86  # of a URI among a certificate's other names, in DER


_MOST_DAYS = 36_500


def make_keys(
    directory: str | os.PathLike[str],
    *,
    roles: Sequence[str] = ROLES,
    days: float = 365.0,
    job: str = EVERY_JOB,
    authority: str | os.PathLike[str] | None = None,
) -> dict[str, Path]:
    """Make a private authority and a certificate for each role.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     sorted(path.name for path in make_keys(directory).values())
    ['authority.pem', 'directory.pem', 'experts.pem', 'parameters.pem', 'worker.pem']

    ``authority.pem`` is the authority's certificate, which every process needs; ``<role>.pem`` holds a role's
    certificate and private key, for the processes of that role alone. ``authority.key`` signs further certificates.
    If the directory has an authority already, it signs the new certificates and stays as it is.

    Args:
        directory: the folder to write; made with mode 0700 if it does not exist. Files have mode 0600.
        roles: the roles to make certificates for.
        days: the number of days for which they are valid.
        job: their job: processes with certificates of two jobs refuse each other. ``"*"`` is every job.
        authority: a directory whose authority signs instead; its certificate is copied, its key is not.

    Returns:
        The path of each role's file, and of ``"authority"``.

    Raises:
        ValueError: an unknown role, no name of a job, or a file that exists: nothing is overwritten.
        ModuleNotFoundError: without the ``tls`` extra.
    """
    if find_spec("cryptography") is None:
        raise ModuleNotFoundError(
            "making certificates needs cryptography: pip install 'anabranch[tls]'", name="cryptography"
        )
    folder = Path(directory)
    if not _JOB.fullmatch(job):
        raise ValueError(f"job={job!r} is not a job name; use letters, digits, '_', '-' and '.', up to 64, or '*'")
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise ValueError(f"unknown roles {unknown}; roles are {', '.join(ROLES)}")
    existing = [f"{role}.pem" for role in roles if (folder / f"{role}.pem").exists()]
    if existing:
        raise ValueError(f"{folder} already holds {', '.join(existing)}; remove them first, or give a new directory")
    if not abs(days) <= _MOST_DAYS:
        raise ValueError(f"days={days!r} is not a validity period; give a number up to {_MOST_DAYS}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is not a directory; name one, which may not exist yet")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    signer = folder if authority is None else Path(authority)
    if authority is not None and not (signer / "authority.pem").exists():
        raise ValueError(f"{signer} holds no authority.pem; make it with: anabranch keys {signer}")
    certificate, key = _authority(signer, days)
    paths = {"authority": folder / "authority.pem"}
    if not paths["authority"].exists():
        _write_private(paths["authority"], (signer / "authority.pem").read_bytes())
    elif paths["authority"].read_bytes() != (signer / "authority.pem").read_bytes():
        raise ValueError(f"{folder} holds a different authority than {signer}; give a new directory")
    for role in roles:
        paths[role] = folder / f"{role}.pem"
        _write_private(paths[role], _issue(role, job, certificate, key, days))
    return paths


def _authority(folder: Path, days: float) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    certificate_path, key_path = folder / "authority.pem", folder / "authority.key"
    if certificate_path.exists():
        if not key_path.exists():
            raise ValueError(f"{folder} has an authority but not its key; add authority.key to sign with")
        _check_private(key_path)
        key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{key_path} is not a key written by make_keys")
        return x509.load_pem_x509_certificate(certificate_path.read_bytes()), key
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"authority {os.urandom(4).hex()}")
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_key_usage(signs_certificates=True), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    ]
    certificate = _signed(name, key, name, key, days, extensions)
    _write_private(key_path, _private_bytes(key))
    _write_private(certificate_path, certificate.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def _issue(
    role: str, job: str, authority: x509.Certificate, authority_key: EllipticCurvePrivateKey, days: float
) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{_URI}{job}/{role}")]), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False),
    ]
    certificate = _signed(_name(role), key, authority.subject, authority_key, days, extensions)
    return certificate.public_bytes(serialization.Encoding.PEM) + _private_bytes(key)


def _signed(
    subject: x509.Name,
    key: EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: EllipticCurvePrivateKey,
    days: float,
    extensions: Sequence[tuple[x509.ExtensionType, bool]],
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.now(UTC)
    # Clocks of a cluster differ by minutes.
    start = min(now - timedelta(hours=1), now + timedelta(days=days) - timedelta(hours=1))
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(now + timedelta(days=days))
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(issuer_key, hashes.SHA256())


def _name(common_name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name.from_rfc4514_string(f"CN={common_name},O=anabranch")


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    never = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only"), False,
    )  # fmt: skip
    return x509.KeyUsage(digital_signature=True, key_cert_sign=signs_certificates, crl_sign=signs_certificates, **never)


def _private_bytes(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_private(path: Path, contents: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(contents)


def resolve_keys(keys: str | os.PathLike[str] | None) -> Path | None:
    """Return the directory of keys: the given one, the environment's, or ``None``."""
    chosen = keys if keys is not None else os.environ.get(KEYS_VARIABLE) or None
    return None if chosen is None else Path(chosen)


def server_context(keys: Path, role: str) -> ssl.SSLContext:
    """Return the TLS side of a server of ``role``: refuses every client without a certificate of our authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return _arm(context, keys, role)


def client_context(keys: Path, role: str) -> ssl.SSLContext:
    """Return the TLS side of a client of ``role``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return _arm(context, keys, role)


def _arm(context: ssl.SSLContext, keys: Path, role: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    check_keys(keys, role)
    try:
        context.load_verify_locations(keys / "authority.pem")
        context.load_cert_chain(keys / f"{role}.pem")
    except ssl.SSLError as error:
        why = error.reason or "it does not hold a certificate with its key"
        raise ValueError(f"{keys}: authority.pem or {role}.pem is damaged: {why}") from None
    return context


def check_keys(keys: Path, role: str) -> None:
    """Refuse a directory that lacks the certificates of ``role``, or whose files others can read or replace.

    Raises:
        ValueError: names the file and the cure.
    """
    for name in ("authority.pem", f"{role}.pem"):
        if not (keys / name).is_file():
            raise ValueError(f"{keys} holds no {name}; make it with: anabranch keys {keys}")
    _check_unchanged(keys)
    _check_private(keys / f"{role}.pem")


def _check_private(path: Path) -> None:
    """Refuses a private key that others can read; a group that this process is in may, as Kubernetes mounts them."""
    facts = path.stat()
    mode = stat.S_IMODE(facts.st_mode)
    ours = facts.st_gid in (os.getegid(), *os.getgroups())
    if mode & 0o077 & ~(0o040 if ours else 0):
        raise ValueError(
            f"{path} holds a private key and has mode {mode:04o}, open to other users; "
            f"close it with: chmod 600 {shlex.quote(str(path))}"
        )


def _check_unchanged(folder: Path) -> None:
    """Refuses a directory where other users can put a key or their own authority."""
    for path in (folder, folder / "authority.pem"):
        facts = path.stat()
        mode = stat.S_IMODE(facts.st_mode)
        if stat.S_ISDIR(facts.st_mode) and mode & stat.S_ISVTX:
            continue  # other users cannot remove our files there, but may have created theirs first
        if mode & 0o002:
            who, cure = "any user", "o-w"
        elif mode & 0o020 and facts.st_gid not in (os.getegid(), *os.getgroups()):
            who, cure = f"users of group {facts.st_gid}", "g-w"
        else:
            continue
        raise ValueError(
            f"{path} has mode {mode:04o}: {who} can replace the certificates; "
            f"close it with: chmod {cure} {shlex.quote(str(path))}"
        )
    around, authority = folder.stat(), (folder / "authority.pem").stat()
    if around.st_mode & 0o022 and authority.st_uid not in (0, os.geteuid(), around.st_uid):
        raise ValueError(
            f"{folder / 'authority.pem'} is in a directory that others can write to, and belongs to user "
            f"{authority.st_uid}: give keys=DIR your own directory, made with: anabranch keys DIR"
        )


def job_of_keys(keys: Path, role: str) -> str:
    """Return the job that ``role``'s own certificate names.

    Raises:
        ValueError: it has no job.
    """
    # The ssl module decodes only a peer's certificate. The URI is in ours as plain bytes, after its tag and size.
    text = (keys / f"{role}.pem").read_text(errors="replace")
    end = "-----END CERTIFICATE-----"
    der = ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE") : text.index(end) + len(end)])
    at = der.find(_URI.encode())
    while at >= 2:
        found = _NAMES.fullmatch(der[at : at + der[at - 1]].decode("ascii", errors="replace"))
        if der[at - 2] == _URI_TAG and found:
            return found[1]
        at = der.find(_URI.encode(), at + 1)
    raise ValueError(f"{keys / role}.pem names no job; make new certificates with: anabranch keys DIR --job NAME")


def names_of(connection: ssl.SSLSocket) -> tuple[str, str] | None:
    """Return the job and the role in the peer's certificate, ``None`` if it has neither."""
    for name in (connection.getpeercert() or {}).get("subjectAltName", ()):
        if name[0] == "URI" and (found := _NAMES.fullmatch(str(name[1]))):
            return found[1], found[2]
    return None
