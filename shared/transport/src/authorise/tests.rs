use std::sync::Arc;

use super::*;
use crate::identity::{AuthoritySettings, CertificateAuthority, Identity};

/// A day in 2030.
const NOW: u64 = 1_900_000_000;
const DAY: u64 = 24 * 3600;

struct Fleet {
    clock: Arc<WallClock>,
    authority: CertificateAuthority,
}

fn fleet() -> Fleet {
    let clock = WallClock::manual(NOW);
    let authority =
        CertificateAuthority::in_memory(Arc::clone(&clock), AuthoritySettings::default());
    Fleet { clock, authority }
}

impl Fleet {
    fn identity(&self, role: &Role) -> Identity {
        self.authority.identity(role).unwrap()
    }

    fn trust(&self) -> Arc<Trust> {
        Trust::new(
            self.authority.certificate().clone(),
            Arc::clone(&self.clock),
        )
    }
}

fn node() -> Role {
    Role::Node(NodeId::new("edge-1").unwrap())
}

fn app() -> Role {
    Role::App(QueryId::new("plant").unwrap())
}

/// One line per protocol and certificate: who the peer is, or the kind of refusal.
fn verdict(alpn: Alpn, chain: &[CertificateDer<'_>], trust: &Trust) -> &'static str {
    match authorise(alpn, chain, trust) {
        Ok(Principal::Agent { .. }) => "agent",
        Ok(Principal::App { .. }) => "app",
        Ok(Principal::Coordinator) => "coordinator",
        Ok(Principal::AppNewcomer) => "app newcomer",
        Ok(Principal::Newcomer) => "newcomer",
        Ok(Principal::Renewing { .. }) => "renewing",
        Err(Refused::CertificateRequired { .. }) => "needs certificate",
        Err(Refused::Expired { .. }) => "expired",
        Err(Refused::Foreign { .. }) => "foreign",
        Err(Refused::WrongRole { .. }) => "wrong role",
        Err(Refused::NotYetValid { .. }) => "not yet valid",
        Err(Refused::Unusable { .. }) => "unusable",
        Err(Refused::WrongKey { .. }) => "wrong key",
        Err(Refused::NoAuthority) => "no authority",
    }
}

#[test]
fn every_protocol_meets_every_kind_of_certificate() {
    let ours = fleet();
    let other = fleet();
    let trust = ours.trust();
    let agent = ours.identity(&node()).chain();
    let app = ours.identity(&app()).chain();
    let coordinator = ours.identity(&Role::Coordinator).chain();
    let foreign = other.identity(&node()).chain();
    let expired = ours.identity(&node()).chain();

    // Columns: none, expired agent, other authority, agent, app, coordinator.
    let table: [(Alpn, [&str; 6]); 4] = [
        (
            Alpn::Agent,
            [
                "needs certificate",
                "expired",
                "foreign",
                "agent",
                "wrong role",
                "wrong role",
            ],
        ),
        (
            Alpn::App,
            [
                "app newcomer",
                "wrong role",
                "foreign",
                "wrong role",
                "app",
                "wrong role",
            ],
        ),
        (
            Alpn::Data,
            [
                "needs certificate",
                "expired",
                "foreign",
                "agent",
                "app",
                "wrong role",
            ],
        ),
        (
            Alpn::Join,
            [
                "newcomer",
                "renewing",
                "foreign",
                "renewing",
                "wrong role",
                "wrong role",
            ],
        ),
    ];
    for (alpn, [none, expired_, foreign_, agent_, app_, coordinator_]) in table {
        ours.clock.set(NOW);
        assert_eq!(verdict(alpn, &[], &trust), none, "{alpn}: none");
        assert_eq!(verdict(alpn, &foreign, &trust), foreign_, "{alpn}: foreign");
        assert_eq!(verdict(alpn, &agent, &trust), agent_, "{alpn}: agent");
        assert_eq!(verdict(alpn, &app, &trust), app_, "{alpn}: app");
        assert_eq!(
            verdict(alpn, &coordinator, &trust),
            coordinator_,
            "{alpn}: coordinator"
        );
        ours.clock.set(NOW + 31 * DAY);
        assert_eq!(verdict(alpn, &expired, &trust), expired_, "{alpn}: expired");
    }
}

#[test]
fn an_expired_app_is_told_to_register_again() {
    let ours = fleet();
    let trust = ours.trust();
    let chain = ours.identity(&app()).chain();
    ours.clock.set(NOW + 3 * DAY);
    for alpn in [Alpn::App, Alpn::Data] {
        let refused = authorise(alpn, &chain, &trust).unwrap_err();
        assert!(
            refused.to_string().contains("register the query again"),
            "{refused}"
        );
    }
}

#[test]
fn an_expired_foreign_certificate_is_foreign() {
    let ours = fleet();
    let trust = ours.trust();
    let chain = fleet().identity(&node()).chain();
    ours.clock.set(NOW + 400 * DAY);
    assert_eq!(verdict(Alpn::Join, &chain, &trust), "foreign");
}

/// Field report 24: a clock that is behind is a temporary condition with a message of its own.
#[test]
fn field_024_not_yet_valid_names_the_clock() {
    let ours = fleet();
    let trust = ours.trust();
    let chain = ours.identity(&node()).chain();
    ours.clock.set(NOW - 3 * DAY);
    for alpn in [Alpn::Agent, Alpn::Data, Alpn::Join] {
        let refused = authorise(alpn, &chain, &trust).unwrap_err();
        assert!(
            refused.to_string().contains("one of the clocks is wrong"),
            "{refused}"
        );
    }
    // Certificates are dated back, so clocks may differ by hours.
    ours.clock.set(NOW - DAY);
    assert_eq!(verdict(Alpn::Agent, &chain, &trust), "agent");
}

#[test]
fn between_neighbours_the_named_key_is_the_trust() {
    let ours = fleet();
    let trust = ours.trust();
    let named = ours.identity(&node());
    let impostor = ours.identity(&node());
    let id = NodeId::new("edge-1").unwrap();
    trust.set_peers([(id, named.key().fingerprint())]);
    assert_eq!(verdict(Alpn::Data, &named.chain(), &trust), "agent");
    assert_eq!(verdict(Alpn::Data, &impostor.chain(), &trust), "wrong key");
    ours.clock.set(NOW + 400 * DAY);
    assert_eq!(
        verdict(Alpn::Data, &named.chain(), &trust),
        "agent",
        "a site survives the coordinator's absence"
    );
    assert_eq!(
        verdict(Alpn::Agent, &named.chain(), &trust),
        "expired",
        "the coordinator wants it renewed"
    );
}

#[test]
fn certificates_of_no_role_are_unusable() {
    let ours = fleet();
    let trust = ours.trust();
    let authority = ours.authority.certificate().clone();
    assert_eq!(verdict(Alpn::Agent, &[authority], &trust), "unusable");
    let garbage = CertificateDer::from(vec![0x30, 0x03, 0x02, 0x01, 0x00]);
    assert_eq!(verdict(Alpn::Agent, &[garbage], &trust), "unusable");
    let agent = ours.identity(&node()).chain();
    assert_eq!(
        verdict(Alpn::Agent, &agent, &Trust::none(Arc::clone(&ours.clock))),
        "no authority"
    );
}
