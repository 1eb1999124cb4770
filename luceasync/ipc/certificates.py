"""Certificates of machines that trust each other: one file per machine, and the owner's authority.

Owns the contents of a file, and the settings of TLS. Only `pair` needs the package cryptography.
"""

from __future__ import annotations

import datetime
import os
import re
import ssl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from luceasync.errors import ConfigError

AUTHORITY = "authority"
SUFFIX = ".pem"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
VALID = datetime.timedelta(days=3650)
CLOCKS_DIFFER = datetime.timedelta(days=1)
CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
MAX_FILE_BYTES = 1 << 20


def tls_context(file: Path, flag: str, *, is_server: bool) -> ssl.SSLContext:
    """TLS 1.3 with the certificate of this machine; the other end must have one from the same
    authority. Raises ConfigError, which names `flag`."""
    role = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(role)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # connections are never resumed
    try:
        with file.open(encoding="ascii") as opened:
            found = CERTIFICATE.findall(opened.read(MAX_FILE_BYTES))
        if len(found) < 2:
            raise ValueError("it has no key, certificate and authority")
        context.load_cert_chain(file, password=_refuse_password)
        context.load_verify_locations(cadata=found[-1])
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or error
        if isinstance(error, UnicodeDecodeError):
            words = "it is not text"
        raise ConfigError(
            f"{flag} {file}: {words}; a file of `luceasync pair` is expected"
        ) from None
    return context


def _refuse_password() -> str:
    raise ValueError("its key is encrypted")


def name_of_peer(sock: ssl.SSLSocket) -> str:
    """The machine that the other end's certificate names."""
    subject: Any = (sock.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return str(names[0]) if names else "?"


def make_pair(folder: Path, names: Sequence[str]) -> list[Path]:
    """Make a file for each machine, with its key, and the authority in `folder` if there is none.
    Raises ConfigError, before anything is written, for names that are not allowed or already taken.
    """
    files = [folder / f"{name}{SUFFIX}" for name in names]
    for name, file in zip(names, files, strict=True):
        if not NAME.fullmatch(name) or name == AUTHORITY:
            raise ConfigError(
                f"{name}: not a machine's name; lower-case letters, digits and inner hyphens are "
                f"expected, and not {AUTHORITY!r}"
            )
        if file.exists() or names.count(name) > 1:
            raise ConfigError(f"{file}: is there already, or named twice; delete it for a new one")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _Authority.of(folder / f"{AUTHORITY}{SUFFIX}")
        for name, file in zip(names, files, strict=True):
            _write_private(file, authority.issue(name))
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None
    return files


def _write_private(file: Path, content: bytes) -> None:
    """Write a file that others cannot read; leave no file if that fails."""
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as opened:
            opened.write(content)
    except OSError:
        with suppress(OSError):
            file.unlink()
        raise


class _Authority:
    """The owner's key, which signs the certificates of machines."""

    def __init__(self, key: Any, certificate: Any) -> None:
        self._key, self._certificate = key, certificate

    @classmethod
    def of(cls, file: Path) -> _Authority:
        """The authority in the file, or a new one. Raises ConfigError, OSError."""
        try:
            from cryptography import x509
            from cryptography.hazmat.primitives import serialization
        except ImportError:
            raise ConfigError(
                "luceasync pair needs the package cryptography: pip install 'luceasync[cluster]'"
            ) from None
        if not file.exists():
            authority = cls._new()
            _write_private(file, _pem_of_key(authority._key) + _pem(authority._certificate))
            return authority
        content = file.read_bytes()
        try:
            key = serialization.load_pem_private_key(content, None)
            return cls(key, x509.load_pem_x509_certificate(content))
        except ValueError as error:
            raise ConfigError(f"{file}: not an authority of luceasync pair: {error}") from None

    @classmethod
    def _new(cls) -> _Authority:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = _subject("luceasync authority")
        builder = _builder(name, name, key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        builder = builder.add_extension(_usage(signs_certificates=True), True)
        return cls(key, _signed(builder, key, key.public_key()))

    def issue(self, name: str) -> bytes:
        """A machine's key and certificate, and this authority's certificate."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_subject(name), self._certificate.subject, key.public_key())
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(names, False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_usage(signs_certificates=False), True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), False)
        signed = _signed(builder, self._key, self._key.public_key())
        return _pem_of_key(key) + _pem(signed) + _pem(self._certificate)


def _subject(name: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: Any, issuer: Any, public_key: Any) -> Any:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer)
    builder = builder.public_key(public_key).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - CLOCKS_DIFFER).not_valid_after(now + VALID)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), False)


def _usage(*, signs_certificates: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: Any, key: Any, public_key: Any) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(public_key)
    return builder.add_extension(issuer, False).sign(key, hashes.SHA256())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _pem_of_key(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
