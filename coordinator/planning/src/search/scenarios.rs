//! The fleet as it may become: what plans are searched for and certified ahead of time.

use compass_shared::model::cluster::Cluster;
use compass_shared::units::Bandwidth;

use crate::predict::Context;

/// The fleets worth having a plan for: links out of the source's site at this part of their rate, and the site alone.
pub(crate) fn imagined(context: &Context<'_>, degraded_part: f64) -> [Cluster; 2] {
    [degraded(context, degraded_part), site_only(context)]
}

/// The fleet with every link out of the source's site at a part of its rate.
pub(super) fn degraded(context: &Context<'_>, part: f64) -> Cluster {
    let mut cluster = context.cluster.clone();
    let site = |id| context.cluster.nodes.get(id).map(|n| &n.description.site);
    let home = site(&context.query.entry);
    for ((from, to), link) in &mut cluster.links {
        if (site(from) == home) != (site(to) == home) {
            let rate = crate::predict::planned_rate(link, context.settings);
            link.bandwidth = Bandwidth((rate.0 as f64 * part) as u64);
            link.lower_bound = false;
        }
    }
    cluster
}

/// The source's site without the rest of the fleet.
pub(super) fn site_only(context: &Context<'_>) -> Cluster {
    let mut cluster = context.cluster.clone();
    let home = context
        .cluster
        .nodes
        .get(&context.query.entry)
        .map(|n| n.description.site.clone());
    for node in cluster.nodes.values_mut() {
        if Some(&node.description.site) != home.as_ref() {
            node.online = false;
        }
    }
    cluster
}
