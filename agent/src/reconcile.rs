//! What to do so that what runs becomes what the target asks for. Pure: [`reconcile`] compares, the node carries out.

use std::collections::BTreeMap;

use compass_shared::ids::InstanceId;
use compass_shared::model::plan::{InstanceTarget, NodeTarget};

/// One thing to do; actions on different instances are independent.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Fetch what it needs and start it.
    Start(InstanceTarget),
    /// It runs (or starts), but not as asked for: give it its share, or start it anew and change over when that is warm.
    Replace(InstanceTarget),
    /// Finish what it is doing and end it.
    Stop(InstanceId),
}

/// The actions that lead from what runs (or is starting) to the target, in the order of instance ids, stops last.
///
/// Applying them and comparing again gives no actions.
pub fn reconcile(
    current: &BTreeMap<InstanceId, InstanceTarget>,
    target: &NodeTarget,
) -> Vec<Action> {
    let wanted: BTreeMap<_, _> = target
        .instances
        .iter()
        .map(|instance| (instance.instance, instance))
        .collect();
    let mut actions = Vec::new();
    for (id, instance) in &wanted {
        match current.get(id) {
            None => actions.push(Action::Start((*instance).clone())),
            Some(running) if running != *instance => {
                actions.push(Action::Replace((*instance).clone()))
            }
            Some(_) => {}
        }
    }
    actions.extend(
        current
            .keys()
            .filter(|id| !wanted.contains_key(id))
            .map(|id| Action::Stop(*id)),
    );
    actions
}

#[cfg(test)]
mod tests {
    use super::*;
    use compass_shared::ids::{Commit, NodeId, OperatorKind};
    use compass_shared::model::catalogue::{Runtime, StateKind};
    use compass_shared::model::cluster::Resources;
    use compass_shared::model::pipeline::Configuration;
    use compass_shared::units::Millicores;
    use proptest::prelude::*;

    fn instance(id: u64, cpu: u32) -> InstanceTarget {
        InstanceTarget {
            instance: InstanceId(id),
            kind: OperatorKind::new("sampler").unwrap(),
            runtime: Runtime::Native("sampler".to_owned()),
            configuration: Configuration::default(),
            artifact: None,
            share: Resources {
                cpu: Millicores(cpu),
                ..Resources::default()
            },
            state: StateKind::None,
        }
    }

    fn target(instances: Vec<InstanceTarget>) -> NodeTarget {
        NodeTarget {
            commit: Commit::default(),
            node: NodeId::new("n").unwrap(),
            instances,
            queries: vec![],
            peers: vec![],
            standby: vec![],
        }
    }

    fn apply(current: &mut BTreeMap<InstanceId, InstanceTarget>, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Start(new) => {
                    assert!(current.insert(new.instance, new).is_none(), "started twice")
                }
                Action::Replace(new) => assert!(
                    current.insert(new.instance, new).is_some(),
                    "replaced nothing"
                ),
                Action::Stop(id) => {
                    assert!(current.remove(&id).is_some(), "stopped what does not run")
                }
            }
        }
    }

    fn instances() -> impl Strategy<Value = Vec<InstanceTarget>> {
        proptest::collection::btree_map(0..8_u64, 0..3_u32, 0..8)
            .prop_map(|map| map.into_iter().map(|(id, cpu)| instance(id, cpu)).collect())
    }

    proptest! {
        #[test]
        fn applying_reaches_the_target_and_then_nothing_is_left_to_do(before in instances(), after in instances()) {
            let mut current: BTreeMap<_, _> = before.into_iter().map(|i| (i.instance, i)).collect();
            let target = target(after.clone());
            let actions = reconcile(&current, &target);
            apply(&mut current, actions);
            prop_assert_eq!(current.values().cloned().collect::<Vec<_>>(), after);
            prop_assert_eq!(reconcile(&current, &target), vec![]);
        }

        #[test]
        fn what_is_already_right_is_left_alone(same in instances()) {
            let current: BTreeMap<_, _> = same.iter().map(|i| (i.instance, i.clone())).collect();
            prop_assert_eq!(reconcile(&current, &target(same)), vec![]);
        }
    }
}
