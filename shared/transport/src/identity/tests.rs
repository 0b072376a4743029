use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use compass_shared::ids::NodeId;

use super::*;
use crate::clock::WallClock;

const NOW: u64 = 1_900_000_000;
const DAY: u64 = 24 * 3600;

fn clock() -> Arc<WallClock> {
    WallClock::manual(NOW)
}

fn authority() -> CertificateAuthority {
    CertificateAuthority::in_memory(clock(), AuthoritySettings::default())
}

fn node(name: &str) -> Role {
    Role::Node(NodeId::new(name).unwrap())
}

fn open(folder: &Path) -> Result<CertificateAuthority, IdentityError> {
    CertificateAuthority::open_or_create(folder, clock(), AuthoritySettings::default())
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn the_authority_is_made_once_and_reloaded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ca");
    let first = open(&path).unwrap();
    assert_eq!(mode(&path.join("authority-key.pem")), 0o600);
    let issued = first.identity(&node("edge-1")).unwrap();

    let second = open(&path).unwrap();
    assert_eq!(second.fingerprint(), first.fingerprint());
    assert_eq!(second.certificate(), first.certificate());
    let later = second.identity(&node("edge-1")).unwrap();
    for identity in [issued, later] {
        let standing = standing(
            identity.certificate(),
            identity.facts(),
            second.certificate(),
            NOW,
        );
        assert_eq!(standing, Ok(Standing::Valid));
    }
}

#[test]
fn an_interrupted_first_start_is_completed() {
    let folder = tempfile::tempdir().unwrap();
    let first = open(folder.path()).unwrap();
    let issued = first.identity(&node("edge-1")).unwrap();
    fs::remove_file(folder.path().join("authority.pem")).unwrap();
    let second = open(folder.path()).unwrap();
    assert_eq!(second.fingerprint(), first.fingerprint());
    let chain = second
        .issue(issued.role(), &issued.key().signing_request())
        .unwrap();
    issued
        .renewed(chain)
        .expect("the authority is its key, whatever its certificate's bytes");
}

/// Field report 42, for the authority: no damage ever makes a second one.
#[test]
fn field_042_damaged_authority_files_are_named() {
    for (file, content) in [
        ("authority-key.pem", &b""[..]),
        (
            "authority-key.pem",
            b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
        ),
        ("authority-key.pem", &[0; 100]),
        ("authority-key.pem", &[0xff; 100]),
        ("authority.pem", b""),
        ("authority.pem", &[0; 100]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        open(folder.path()).unwrap();
        fs::write(folder.path().join(file), content).unwrap();
        let error = open(folder.path()).unwrap_err();
        assert!(matches!(error, IdentityError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains(file), "{error}");
        assert_eq!(
            fs::read(folder.path().join(file)).unwrap(),
            content,
            "left as it was"
        );
    }
    let folder = tempfile::tempdir().unwrap();
    open(folder.path()).unwrap();
    fs::remove_file(folder.path().join("authority-key.pem")).unwrap();
    assert!(matches!(
        open(folder.path()).unwrap_err(),
        IdentityError::Damaged { .. }
    ));
}

#[test]
fn a_key_that_others_can_read_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    open(folder.path()).unwrap();
    let key = folder.path().join("authority-key.pem");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    let message = open(folder.path()).unwrap_err().to_string();
    assert!(message.contains("0644"), "{message}");
}

#[test]
fn from_a_request_only_the_key_is_taken() {
    let authority = authority();
    let key = PrivateKey::generate();
    // A request that asks to be the coordinator and an authority of its own.
    let mut greedy = rcgen::CertificateParams::new(vec!["coordinator.compass".to_owned()]).unwrap();
    greedy.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    greedy.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
    let request = greedy.serialize_request(key.pair()).unwrap();
    let chain = authority.issue(&node("edge-1"), request.der()).unwrap();
    let identity = Identity::from_chain(key, chain).unwrap();
    assert_eq!(identity.role(), &node("edge-1"));
    let (_, parsed) =
        x509_parser::parse_x509_certificate(identity.certificate()).expect("it was just issued");
    assert!(!parsed.is_ca());
    assert!(!parsed.key_usage().unwrap().unwrap().value.key_cert_sign());
}

#[test]
fn requests_are_checked() {
    let authority = authority();
    let key = PrivateKey::generate();
    let mut forged = key.signing_request();
    assert_eq!(request_fingerprint(&forged).unwrap(), key.fingerprint());
    let last = forged.len() - 1;
    forged[last] ^= 1;
    for request in [forged, Vec::new(), vec![0x30; 100], vec![0; 100_000]] {
        let error = authority.issue(&node("edge-1"), &request).unwrap_err();
        assert!(matches!(error, IdentityError::Request(_)), "{error}");
    }
    let message = authority
        .renew(
            &node("edge-1"),
            PrivateKey::generate().fingerprint(),
            &key.signing_request(),
        )
        .unwrap_err()
        .to_string();
    assert!(message.contains("registered with key"), "{message}");
}

#[test]
fn lifetimes_and_renewal_times() {
    let settings = AuthoritySettings::default();
    let authority = authority();
    let facts = |role: &Role| authority.identity(role).unwrap().facts().clone();
    let agent = facts(&node("edge-1"));
    assert_eq!(agent.not_after_unix_s, NOW + 30 * DAY);
    assert_eq!(agent.not_before_unix_s, NOW - settings.backdate.as_secs());
    assert_eq!(agent.renew_at_unix_s(settings.backdate), NOW + 10 * DAY);
    assert_eq!(
        agent.renew_at_unix_s(Duration::from_secs(u64::MAX)),
        agent.not_after_unix_s
    );
    let app = facts(&Role::App(compass_shared::ids::QueryId::new("q").unwrap()));
    assert!(app.not_after_unix_s < agent.not_after_unix_s);
}

#[test]
fn a_node_keeps_its_key_and_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let stored = IdentityFolder::new(folder.path().join("identity"));
    assert!(stored.load().unwrap().is_none(), "not joined yet");
    let key = stored.key_or_create().unwrap();
    assert_eq!(mode(&stored.path().join("key.pem")), 0o600);
    assert_eq!(
        stored.key_or_create().unwrap().fingerprint(),
        key.fingerprint()
    );
    let authority = authority();
    let chain = authority
        .issue(&node("edge-1"), &key.signing_request())
        .unwrap();
    let identity = Identity::from_chain(key, chain).unwrap();
    stored.save(&identity).unwrap();
    let loaded = stored.load().unwrap().unwrap();
    assert_eq!(loaded.certificate(), identity.certificate());
    assert_eq!(loaded.role(), &node("edge-1"));

    let renewed = loaded
        .renewed(
            authority
                .issue(&node("edge-1"), &loaded.key().signing_request())
                .unwrap(),
        )
        .unwrap();
    assert_ne!(
        renewed.certificate(),
        loaded.certificate(),
        "serial numbers differ"
    );
    stored.save(&renewed).unwrap();
    assert_eq!(
        stored.load().unwrap().unwrap().certificate(),
        renewed.certificate()
    );
}

#[test]
fn a_renewal_must_fit() {
    let authority = authority();
    let mine = authority.identity(&node("edge-1")).unwrap();
    let request = mine.key().signing_request();
    let other_role = authority.issue(&node("edge-2"), &request).unwrap();
    let other_authority = self::authority().issue(mine.role(), &request).unwrap();
    let other_key = authority
        .issue(mine.role(), &PrivateKey::generate().signing_request())
        .unwrap();
    for chain in [other_role, other_authority, other_key, Vec::new()] {
        assert!(mine.renewed(chain).is_err());
    }
}

/// What becomes of a file's content; `None` when the file is gone.
type Damage = fn(Vec<u8>) -> Option<Vec<u8>>;

/// Field report 42: a damaged identity is named and never quietly replaced.
#[test]
fn field_042_damaged_identity_files_are_named() {
    let make = || {
        let folder = tempfile::tempdir().unwrap();
        let stored = IdentityFolder::new(folder.path());
        stored
            .save(&authority().identity(&node("edge-1")).unwrap())
            .unwrap();
        (folder, stored)
    };
    for file in ["key.pem", "certificate.pem", "authority.pem"] {
        let damages: [Damage; 4] = [
            |_| Some(Vec::new()),
            |whole| Some(whole[..whole.len() / 2].to_vec()),
            |whole| Some(vec![0; whole.len()]),
            |_| None,
        ];
        for (index, damage) in damages.into_iter().enumerate() {
            let (_folder, stored) = make();
            let path = stored.path().join(file);
            match damage(fs::read(&path).unwrap()) {
                Some(content) => fs::write(&path, content).unwrap(),
                // A certificate that is gone means a node that has not joined; the others cannot just be gone.
                None if file == "certificate.pem" => continue,
                None => fs::remove_file(&path).unwrap(),
            }
            let error = stored.load().unwrap_err();
            assert!(
                matches!(error, IdentityError::Damaged { .. }),
                "{file} {index}: {error}"
            );
            if file == "key.pem" {
                assert!(
                    stored.key_or_create().is_err(),
                    "no second key beside a certificate"
                );
            }
        }
    }
}

#[test]
fn keys_do_not_print_themselves() {
    let key = PrivateKey::generate();
    let text = format!("{key:?}");
    assert_eq!(text, format!("PrivateKey({})", key.fingerprint().short()));
    let error =
        PrivateKey::from_pem("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n")
            .unwrap_err();
    assert!(!error.to_string().contains("c2VjcmV0"), "{error}");
}
