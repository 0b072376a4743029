//! `compass node`

use std::fmt::Write;

use compass_shared::api::{NodeView, SetScheduling};
use compass_shared::model::cluster::Scheduling;

use super::{by_prefix, confirm};
use crate::arguments::{Global, Node};
use crate::http::Api;
use crate::output::{Shown, age, print_text, table};

fn all(api: &Api) -> anyhow::Result<Vec<NodeView>> {
    api.get("/v1/nodes")
}

fn find(api: &Api, wanted: &str) -> anyhow::Result<NodeView> {
    let nodes = all(api)?;
    let name = by_prefix("node", wanted, nodes.iter().map(|node| node.id.as_str()))?.to_owned();
    Ok(nodes
        .into_iter()
        .find(|node| node.id.as_str() == name)
        .expect("its name was just found"))
}

fn state(node: &NodeView) -> &'static str {
    match (node.online, node.scheduling) {
        (false, _) => "offline",
        (true, Scheduling::Open) => "ready",
        (true, Scheduling::Cordoned) => "cordoned",
        (true, Scheduling::Draining) => "draining",
    }
}

pub(crate) fn list(global: &Global, api: &Api) -> anyhow::Result<()> {
    let nodes = all(api)?;
    let row = |node: &NodeView| {
        vec![
            node.id.to_string(),
            state(node).to_owned(),
            node.tier.to_string(),
            node.site.clone(),
            node.device.clone(),
            format!("{}/{}", node.granted.cpu, node.capacity.cpu),
            format!(
                "{}/{} MiB",
                node.granted.memory_mib, node.capacity.memory_mib
            ),
            node.since_unix_ms.map_or_else(|| "-".to_owned(), age),
            node.address.clone().unwrap_or_else(|| "-".to_owned()),
            node.applied
                .map_or_else(|| "-".to_owned(), |commit| commit.to_string()),
        ]
    };
    let names = nodes.iter().map(|node| node.id.to_string()).collect();
    let rows = nodes.iter().map(row).collect();
    let header = vec![
        "name",
        "state",
        "tier",
        "site",
        "device",
        "cpu granted",
        "memory granted",
        "session",
        "address",
        "applied",
    ];
    Shown {
        header,
        narrow: 8,
        names,
        rows,
        data: nodes,
    }
    .print(global)
}

pub(crate) fn status(global: &Global, api: &Api, node: &str) -> anyhow::Result<()> {
    let node = find(api, node)?;
    let mut text = format!("node {}  {}\n", node.id, state(&node));
    let _ = writeln!(text, "  tier     {} at site {}", node.tier, node.site);
    let _ = writeln!(text, "  device   {}", node.device);
    let _ = writeln!(
        text,
        "  cpu      {} of {} granted",
        node.granted.cpu, node.capacity.cpu
    );
    let _ = writeln!(
        text,
        "  memory   {} of {} MiB granted",
        node.granted.memory_mib, node.capacity.memory_mib
    );
    if let (Some(address), Some(since)) = (&node.address, node.since_unix_ms) {
        let _ = writeln!(text, "  session  {address} for {}", age(since));
    }
    let _ = writeln!(
        text,
        "  traffic  {:.1} MB sent, {:.1} MB received",
        node.sent_bytes as f64 / 1e6,
        node.received_bytes as f64 / 1e6
    );
    if !node.instances.is_empty() {
        let rows: Vec<_> = node
            .instances
            .iter()
            .map(|i| {
                let (p50, p95) = i.service_ms.map_or_else(
                    || ("-".to_owned(), "-".to_owned()),
                    |(a, b)| (format!("{a:.1} ms"), format!("{b:.1} ms")),
                );
                vec![
                    i.instance.to_string(),
                    i.frames.to_string(),
                    p50,
                    p95,
                    format!("{:.2}/{:.2}", i.busy_cores, i.granted_cores),
                ]
            })
            .collect();
        text.push('\n');
        text.push_str(&table(
            &["instance", "frames", "p50", "p95", "cores busy/granted"],
            &rows,
        ));
    }
    let name = node.id.to_string();
    print_text(global, &node, &name, &text)
}

pub(crate) fn run(global: &Global, api: &Api, command: &Node) -> anyhow::Result<()> {
    let (node, scheduling, reason) = match command {
        Node::Drain { node, reason } => (node, Scheduling::Draining, reason.clone()),
        Node::Cordon { node, reason } => (node, Scheduling::Cordoned, reason.clone()),
        Node::Uncordon { node } => (node, Scheduling::Open, None),
        Node::List => return list(global, api),
        Node::Status { node } => return status(global, api, node),
    };
    let found = find(api, node)?;
    if scheduling == Scheduling::Draining {
        confirm(
            global,
            &format!(
                "Drain node {}? Its {} instances move to other nodes.",
                found.id,
                found.instances.len()
            ),
        )?;
    }
    let changed: NodeView = api.put(
        &format!("/v1/nodes/{}/scheduling", found.id),
        &SetScheduling { scheduling, reason },
    )?;
    let text = format!("node {} {}\n", changed.id, state(&changed));
    let name = changed.id.to_string();
    print_text(global, &changed, &name, &text)
}
