//! Single steps of one core, seen from outside.

use super::fleet_tests::{instance, node, operator, query, route, target};
use super::*;

fn core_with(me: &str, routes: &[compass_shared::model::plan::Route]) -> Core {
    let mut core = Core::new(node(me), Limits::default());
    core.handle(Moment(1), Input::Target(Box::new(target(me, 1, routes))));
    for step in routes.iter().flat_map(|r| &r.steps) {
        core.handle(Moment(1), Input::InstanceReady(step.instance));
    }
    core
}

fn header(frame: u64, from: Option<&str>, to: Option<&str>, generation: u64) -> FrameHeader {
    FrameHeader {
        query: query(),
        generation: Generation(generation),
        frame: FrameId(frame),
        from: from.map(operator),
        to: to.map(operator),
        age_us: 0,
        content: "bytes".into(),
        attempt: 0,
        payload_bytes: 1,
    }
}

fn frame(core: &mut Core, from: &Neighbour, header: FrameHeader) -> Vec<Effect> {
    core.handle(
        Moment(1),
        Input::Frame {
            from: from.clone(),
            header,
            payload: Bytes::from_static(b"x"),
            link: Duration::ZERO,
        },
    )
}

fn ends(effects: &[Effect]) -> Vec<Outcome> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Control {
                message: HopControl::Ended { outcome, .. },
                ..
            } => Some(*outcome),
            _ => None,
        })
        .collect()
}

fn jobs(effects: &[Effect]) -> usize {
    let is_run = |effect: &&Effect| matches!(effect, Effect::Run(_));
    effects.iter().filter(is_run).count()
}

#[test]
fn a_duplicate_is_not_run_again_but_told_how_the_first_one_ended() {
    let mut core = core_with(
        "near",
        &[route(1, &[("a", &[], "edge"), ("b", &["a"], "near")])],
    );
    let edge = Neighbour::Node(node("edge"));
    core.handle(Moment(1), Input::Connected(edge.clone()));
    let first = frame(&mut core, &edge, header(7, Some("a"), Some("b"), 1));
    let Some(Effect::Run(job)) = first.iter().find(|e| matches!(e, Effect::Run(_))) else {
        panic!("{first:?}")
    };
    let id = job.id;
    let again = frame(&mut core, &edge, header(7, Some("a"), Some("b"), 1));
    assert_eq!(jobs(&again), 0);
    assert_eq!(ends(&again), []);
    let end = core.handle(
        Moment(2),
        Input::Finished {
            job: id,
            end: JobEnd::Skipped,
        },
    );
    assert_eq!(ends(&end), [Outcome::Skipped], "one sender, told once");
    let late = frame(&mut core, &edge, header(7, Some("a"), Some("b"), 1));
    assert_eq!(jobs(&late), 0);
    assert_eq!(ends(&late), [Outcome::Skipped]);
}

#[test]
fn an_app_speaks_for_its_own_query_only() {
    let mut core = core_with("edge", &[route(1, &[("a", &[], "edge")])]);
    let stranger = Neighbour::App(QueryId::new("other").unwrap());
    core.handle(Moment(1), Input::Connected(stranger.clone()));
    assert_eq!(frame(&mut core, &stranger, header(1, None, None, 0)), []);
    let owner = Neighbour::App(query());
    core.handle(Moment(1), Input::Connected(owner.clone()));
    let effects = frame(&mut core, &owner, header(1, None, Some("a"), 0));
    assert_eq!(jobs(&effects), 1);
    let ended = HopControl::Ended {
        query: query(),
        frame: FrameId(1),
        to: None,
        outcome: Outcome::Answered,
    };
    let effects = core.handle(
        Moment(1),
        Input::Control {
            from: stranger,
            message: ended,
        },
    );
    assert_eq!(effects, []);
    assert!(core.is_active(), "the frame is still in care");
}

#[test]
fn a_frame_older_than_its_deadline_is_dropped_on_arrival() {
    let mut core = core_with(
        "near",
        &[route(1, &[("a", &[], "edge"), ("b", &["a"], "near")])],
    );
    let edge = Neighbour::Node(node("edge"));
    core.handle(Moment(1), Input::Connected(edge.clone()));
    let mut old = header(1, Some("a"), Some("b"), 1);
    old.age_us = 1_190_000;
    let effects = core.handle(
        Moment(10_000_000),
        Input::Frame {
            from: edge,
            header: old,
            payload: Bytes::new(),
            link: Duration::from_millis(10),
        },
    );
    assert_eq!(ends(&effects), [Outcome::Expired]);
    assert!(!core.is_active());
}

#[test]
fn an_operator_that_fails_on_a_frame_gets_one_more_try() {
    let mut core = core_with("edge", &[route(1, &[("a", &[], "edge")])]);
    let app = Neighbour::App(query());
    core.handle(Moment(1), Input::Connected(app.clone()));
    let mut effects = frame(&mut core, &app, header(1, None, None, 0));
    for expected in [vec![], vec![Outcome::Rejected]] {
        let job = effects.iter().find_map(|effect| match effect {
            Effect::Run(job) => Some(job.id),
            _ => None,
        });
        effects = core.handle(
            Moment(2),
            Input::Finished {
                job: job.unwrap(),
                end: JobEnd::Failed,
            },
        );
        assert_eq!(ends(&effects), expected);
    }
    assert!(!core.is_active());
}

#[test]
fn a_frame_waits_for_a_worker_that_restarts() {
    let mut core = core_with("edge", &[route(1, &[("a", &[], "edge")])]);
    let app = Neighbour::App(query());
    core.handle(Moment(1), Input::Connected(app.clone()));
    let stopped = Input::InstanceStopped(instance("a", "edge"));
    core.handle(Moment(1), stopped);
    assert_eq!(jobs(&frame(&mut core, &app, header(1, None, None, 0))), 0);
    assert!(core.is_busy(instance("a", "edge")));
    let ready = Input::InstanceReady(instance("a", "edge"));
    assert_eq!(jobs(&core.handle(Moment(2), ready)), 1);
}

#[test]
fn a_frame_of_a_generation_that_is_not_known_yet_waits_for_its_target() {
    let old = route(1, &[("a", &[], "edge"), ("b", &["a"], "cloud")]);
    let new = route(2, &[("a", &[], "edge"), ("b", &["a"], "near")]);
    let mut core = core_with("near", std::slice::from_ref(&old));
    let edge = Neighbour::Node(node("edge"));
    core.handle(Moment(1), Input::Connected(edge.clone()));
    let effects = frame(&mut core, &edge, header(1, Some("a"), Some("b"), 2));
    assert_eq!((jobs(&effects), ends(&effects)), (0, vec![]));
    let newer = Input::Target(Box::new(target("near", 2, &[old, new])));
    core.handle(Moment(2), newer);
    let ready = Input::InstanceReady(instance("b", "near"));
    assert_eq!(jobs(&core.handle(Moment(2), ready)), 1);
}

#[test]
fn no_more_is_under_way_than_the_window_and_one_frame() {
    let mut core = core_with(
        "edge",
        &[route(1, &[("a", &[], "edge"), ("b", &["a"], "near")])],
    );
    let app = Neighbour::App(query());
    let near = Neighbour::Node(node("near"));
    core.handle(Moment(1), Input::Connected(app.clone()));
    core.handle(Moment(1), Input::Connected(near.clone()));
    let window = Input::Window {
        to: near.clone(),
        bytes: 1,
    };
    core.handle(Moment(1), window);
    let credit = HopControl::Credit {
        query: query(),
        frames: 8,
    };
    core.handle(
        Moment(1),
        Input::Control {
            from: near.clone(),
            message: credit,
        },
    );
    let mut sent = Vec::new();
    for number in 0..3 {
        let mut effects = frame(&mut core, &app, header(number, None, None, 0));
        while let Some(job) = effects.iter().find_map(|effect| match effect {
            Effect::Run(job) => Some(job.id),
            _ => None,
        }) {
            let output = Payload {
                content: "bytes".into(),
                bytes: Bytes::from_static(b"out"),
            };
            effects = core.handle(
                Moment(1),
                Input::Finished {
                    job,
                    end: JobEnd::Output(output),
                },
            );
        }
        sent.extend(
            effects
                .into_iter()
                .filter(|e| matches!(e, Effect::Send { .. })),
        );
    }
    assert_eq!(sent.len(), 1, "{sent:?}");
    let received = HopControl::Received {
        query: query(),
        frame: FrameId(0),
        to: Some(operator("b")),
    };
    let next = core.handle(
        Moment(1),
        Input::Control {
            from: near,
            message: received,
        },
    );
    assert!(matches!(next[..], [Effect::Send { .. }]), "{next:?}");
}

#[test]
fn what_is_stuck_in_a_bad_link_goes_the_new_way() {
    let old = route(1, &[("a", &[], "edge"), ("b", &["a"], "near")]);
    let new = route(2, &[("a", &[], "edge"), ("b", &["a"], "metro")]);
    let mut core = core_with("edge", std::slice::from_ref(&old));
    let app = Neighbour::App(query());
    for neighbour in [
        &app,
        &Neighbour::Node(node("near")),
        &Neighbour::Node(node("metro")),
    ] {
        core.handle(Moment(1), Input::Connected(neighbour.clone()));
        let message = HopControl::Credit {
            query: query(),
            frames: 8,
        };
        core.handle(
            Moment(1),
            Input::Control {
                from: neighbour.clone(),
                message,
            },
        );
    }
    let effects = frame(&mut core, &app, header(1, None, None, 0));
    let Some(Effect::Run(job)) = effects.iter().find(|e| matches!(e, Effect::Run(_))) else {
        panic!("{effects:?}")
    };
    let output = Payload {
        content: "bytes".into(),
        bytes: Bytes::from_static(b"out"),
    };
    let sent = core.handle(
        Moment(1),
        Input::Finished {
            job: job.id,
            end: JobEnd::Output(output),
        },
    );
    let [Effect::Send { send, .. }] = sent[..] else {
        panic!("{sent:?}")
    };
    let degraded = Input::Degraded {
        to: Neighbour::Node(node("near")),
        degraded: true,
    };
    assert_eq!(
        core.handle(Moment(2), degraded),
        [],
        "there is no other way yet"
    );
    let switched = core.handle(
        Moment(3),
        Input::Target(Box::new(target("edge", 2, &[old, new]))),
    );
    let cancelled = Effect::Cancel {
        to: Neighbour::Node(node("near")),
        send,
    };
    assert!(switched.contains(&cancelled), "{switched:?}");
    let again = switched.iter().find_map(|effect| match effect {
        Effect::Send { to, header, .. } => Some((to.clone(), header.generation, header.attempt)),
        _ => None,
    });
    let expected = (Neighbour::Node(node("metro")), Generation(2), 1);
    assert_eq!(again, Some(expected), "{switched:?}");
}

#[test]
fn another_app_may_use_the_frame_numbers_of_the_one_before() {
    let routes = [route(1, &[("a", &[], "edge")])];
    let mut core = core_with("edge", &routes);
    let app = Neighbour::App(query());
    core.handle(Moment(1), Input::Connected(app.clone()));
    let mut first = target("edge", 2, &routes);
    first.queries[0].app_fingerprint = Some(compass_shared::ids::Digest::of(b"first"));
    core.handle(Moment(1), Input::Target(Box::new(first.clone())));
    let effects = frame(&mut core, &app, header(1, None, None, 0));
    let job = effects.iter().find_map(|effect| match effect {
        Effect::Run(job) => Some(job.id),
        _ => None,
    });
    let end = JobEnd::Skipped;
    core.handle(
        Moment(1),
        Input::Finished {
            job: job.unwrap(),
            end,
        },
    );
    let known = frame(&mut core, &app, header(1, None, None, 0));
    assert_eq!(ends(&known), [Outcome::Skipped]);
    let mut second = first;
    second.queries[0].app_fingerprint = Some(compass_shared::ids::Digest::of(b"second"));
    core.handle(Moment(1), Input::Target(Box::new(second)));
    assert_eq!(jobs(&frame(&mut core, &app, header(1, None, None, 0))), 1);
}

fn retries(effects: &[Effect]) -> Vec<(u64, u32)> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Control {
                message: HopControl::RetryAfter { frame, ms, .. },
                ..
            } => Some((frame.0, *ms)),
            _ => None,
        })
        .collect()
}

#[test]
fn a_request_without_room_is_refused_with_a_retry_time_and_none_is_given_up_for_it() {
    let mut core = core_with("edge", &[route(1, &[("a", &[], "edge")])]);
    let app = Neighbour::App(query());
    core.handle(Moment(1), Input::Connected(app.clone()));
    let requests = Input::Control {
        from: app.clone(),
        message: HopControl::Requests { query: query() },
    };
    core.handle(Moment(1), requests);
    let mut running = None;
    for number in 1..=4 {
        let effects = frame(&mut core, &app, header(number, None, None, 0));
        assert_eq!((ends(&effects), retries(&effects)), (vec![], vec![]));
        running = running.or(effects.iter().find_map(|effect| match effect {
            Effect::Run(job) => Some(job.id),
            _ => None,
        }));
    }
    // Nothing is known yet of how long an answer takes: it is spread over the deadline of 1200 ms.
    let effects = frame(&mut core, &app, header(5, None, None, 0));
    assert_eq!(ends(&effects), [Outcome::Rejected]);
    assert_eq!(retries(&effects), [(5, 300)]);

    // The first is answered after 100 ms: there is room for one, and then not before another has ended.
    let at = Moment(1) + Duration::from_millis(100);
    let end = JobEnd::Output(Payload {
        content: "bytes".into(),
        bytes: Bytes::from_static(b"y"),
    });
    let job = running.unwrap();
    core.handle(at, Input::Finished { job, end });
    let answered = HopControl::Ended {
        query: query(),
        frame: FrameId(1),
        to: None,
        outcome: Outcome::Answered,
    };
    let from = app.clone();
    core.handle(
        at,
        Input::Control {
            from,
            message: answered,
        },
    );
    let mut ended = Vec::new();
    for number in [6, 7] {
        let input = Input::Frame {
            from: app.clone(),
            header: header(number, None, None, 0),
            payload: Bytes::from_static(b"x"),
            link: Duration::ZERO,
        };
        ended.push(core.handle(at, input));
    }
    assert_eq!((ends(&ended[0]), retries(&ended[0])), (vec![], vec![]));
    assert_eq!(ends(&ended[1]), [Outcome::Rejected]);
    assert_eq!(retries(&ended[1]), [(7, 25)], "four share 100 ms");

    // Without that word it is a live source: the oldest that waits gives way to the newest, and nobody is asked to come again.
    core.handle(at, Input::Disconnected(app.clone()));
    core.handle(at, Input::Connected(app.clone()));
    let mut live = Vec::new();
    for number in 8..=10 {
        live.extend(frame(&mut core, &app, header(number, None, None, 0)));
    }
    assert!(!ends(&live).is_empty(), "{live:?}");
    assert_eq!(retries(&live), []);
}
