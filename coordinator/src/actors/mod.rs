//! The roles as actors, what keeps them alive, and the way to them.
//!
//! Start at [`Roles`]: every other part of the coordinator tells facts to roles through it and holds no actor's address, because an address
//! dies with its actor and the supervisor puts another in its place. Start at [`host`] to see how they are started.

pub mod explorer;
pub mod host;
pub mod monitor;
pub mod profiler;
pub mod role;
pub mod scheduler;
pub mod supervisor;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use actix::{Actor, Addr, Recipient};
use compass_shared::ids::QueryId;
use tokio::sync::mpsc;

use role::{Retire, Role, RoleActor, Tell};

/// The addresses of a role's present actor.
struct Addresses<I: Send + 'static> {
    tell: Recipient<Tell<I>>,
    retire: Recipient<Retire>,
    #[cfg(test)]
    crash: Recipient<role::Crash>,
}

impl<I: Send + Unpin + 'static> Addresses<I> {
    fn of<R: Role<Input = I> + Unpin>(address: Addr<RoleActor<R>>) -> Self {
        Self {
            tell: address.clone().recipient(),
            #[cfg(test)]
            crash: address.clone().recipient(),
            retire: address.recipient(),
        }
    }
}

/// Where a role's present actor is.
pub struct Slot<I: Send + 'static> {
    addresses: RwLock<Option<Addresses<I>>>,
}

impl<I: Send + 'static> Default for Slot<I> {
    fn default() -> Self {
        Self {
            addresses: RwLock::new(None),
        }
    }
}

impl<I: Send + 'static> Slot<I> {
    /// Tells the role a fact. A fact told while there is no actor is lost: a new one is built from the store and the registries.
    pub fn tell(&self, input: I) {
        let addresses = self
            .addresses
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(addresses) = &*addresses {
            addresses.tell.do_send(Tell(input));
        }
    }

    /// Whether there is an actor.
    pub fn is_alive(&self) -> bool {
        let addresses = self
            .addresses
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        addresses.as_ref().is_some_and(|one| one.tell.connected())
    }

    /// Puts a new actor in place.
    fn set<R: Role<Input = I> + Unpin>(&self, address: Addr<RoleActor<R>>)
    where
        I: Unpin,
    {
        let addresses = Addresses::of(address);
        *self
            .addresses
            .write()
            .unwrap_or_else(PoisonError::into_inner) = Some(addresses);
    }

    /// Makes the present actor panic.
    #[cfg(test)]
    fn crash(&self) {
        let addresses = self.addresses.read().unwrap();
        addresses.as_ref().unwrap().crash.do_send(role::Crash);
    }

    /// Ends the actor for good.
    fn retire(&self) {
        let mut addresses = self
            .addresses
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(addresses) = addresses.take() {
            addresses.retire.do_send(Retire);
        }
    }
}

/// What the host of explorers is asked.
#[derive(Debug)]
pub enum HostCommand {
    /// Start (or restart) the explorer of a query.
    Start(QueryId),
    /// End it for good.
    Stop(QueryId),
}

/// The way to the planning roles.
pub struct Roles {
    /// Watches.
    pub monitor: Slot<monitor::Input>,
    /// Decides.
    pub scheduler: Slot<scheduler::Input>,
    /// Runs trials.
    pub profiler: Slot<profiler::Input>,
    explorers: RwLock<BTreeMap<QueryId, Addresses<explorer::Input>>>,
    host: mpsc::UnboundedSender<HostCommand>,
}

impl Roles {
    /// No role is there yet. The receiver belongs to [`host::run`]; what waits in it is bounded by the number of queries.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<HostCommand>) {
        let (host, commands) = mpsc::unbounded_channel();
        let roles = Self {
            monitor: Slot::default(),
            scheduler: Slot::default(),
            profiler: Slot::default(),
            explorers: RwLock::default(),
            host,
        };
        (roles, commands)
    }

    /// Starts the explorer of a query.
    pub fn start_explorer(&self, query: &QueryId) {
        // Fails only while the process ends.
        let _ = self.host.send(HostCommand::Start(query.clone()));
    }

    /// Ends the explorer of a query.
    pub fn stop_explorer(&self, query: &QueryId) {
        let _ = self.host.send(HostCommand::Stop(query.clone()));
    }

    /// Tells a query's explorer a fact.
    pub fn tell_explorer(&self, query: &QueryId, input: explorer::Input) {
        let explorers = self
            .explorers
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = explorers.get(query) {
            slot.tell.do_send(Tell(input));
        }
    }

    /// Tells every explorer a fact.
    pub fn tell_explorers(&self, input: &explorer::Input) {
        let explorers = self
            .explorers
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        for slot in explorers.values() {
            slot.tell.do_send(Tell(input.clone()));
        }
    }

    /// Ends every role for good.
    pub fn retire(&self) {
        self.monitor.retire();
        self.scheduler.retire();
        self.profiler.retire();
        let mut explorers = self
            .explorers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        for (_, slot) in std::mem::take(&mut *explorers) {
            slot.retire.do_send(Retire);
        }
    }

    fn set_explorer(&self, query: &QueryId, address: Addr<RoleActor<explorer::ExplorerRole>>) {
        let slot = Addresses::of(address);
        let mut explorers = self
            .explorers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        explorers.insert(query.clone(), slot);
    }

    fn remove_explorer(&self, query: &QueryId) {
        let mut explorers = self
            .explorers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(slot) = explorers.remove(query) {
            slot.retire.do_send(Retire);
        }
    }
}

#[cfg(test)]
impl Roles {
    fn crash_explorer(&self, query: &QueryId) {
        self.explorers.read().unwrap()[query]
            .crash
            .do_send(role::Crash);
    }

    fn has_explorer(&self, query: &QueryId) -> bool {
        let explorers = self.explorers.read().unwrap();
        explorers.get(query).is_some_and(|one| one.tell.connected())
    }
}

/// Starts a role's actor on this thread and gives its address.
fn start_role<R: Role + Unpin>(parts: role::Parts<R>) -> Addr<RoleActor<R>>
where
    R::Input: Unpin,
{
    RoleActor::new(parts).start()
}
