//! What the relay's thread does when it is asked something.

use std::collections::HashSet;
use std::net::{SocketAddr, SocketAddrV4};

use anyhow::{Context, bail};

use super::{Engine, Service, local_v4};
use crate::relay::config::check_target;
use crate::relay::control::{
    Description, NodeDescription, PathDescription, Request, Response, ServiceDescription, no_node,
    no_path, no_pipe,
};
use crate::relay::counters::{NamedLinkCounters, RelayCounters};
use crate::relay::shape::ResolvedPipe;
use crate::relay::sockets;

impl Engine {
    /// Carries a request out; an error is its refusal.
    pub(super) fn answer(
        &mut self,
        request: Request,
        pipe: Option<ResolvedPipe>,
    ) -> anyhow::Result<Response> {
        // What is due by now leaves under the rules that held until now.
        self.deliver_due();
        let now = self.now();
        match request {
            Request::Describe => return Ok(Response::Description(self.describe())),
            Request::Counters => return Ok(Response::Counters(self.count())),
            Request::Lateness => return Ok(Response::Lateness(self.lateness.clone().into())),
            Request::SetPipe { name, .. } => {
                let entry = self.pipes.get_mut(&name).with_context(|| no_pipe(&name))?;
                let resolved = pipe.expect("the handle resolves the shape of every SetPipe");
                self.network.set_pipe(now, entry.0, resolved.model(now));
                entry.1 = resolved.shape;
            }
            Request::SetPath { from, to, shape } => {
                shape.check()?;
                let ends = (self.node(&from)?, self.node(&to)?);
                let link = self
                    .paths
                    .get(&ends)
                    .with_context(|| no_path(&from, &to))?
                    .link;
                self.network.set_link(now, link, shape);
            }
            Request::SetTarget {
                node,
                service,
                target,
            } => {
                let index = self.node(&node)?;
                check_target(self.nodes[index].address, target)?;
                self.service_mut(index, service.as_deref())?.target = Some(target);
            }
            Request::ForgetFlows { node } => {
                let node = node.map(|node| self.node(&node)).transpose()?;
                let forgotten = self.flows.forget(node);
                self.closing(&forgotten);
            }
        }
        Ok(Response::Done)
    }

    pub(super) fn node(&self, name: &str) -> anyhow::Result<usize> {
        self.nodes
            .iter()
            .position(|node| node.name == name)
            .with_context(|| no_node(name))
    }

    fn service_mut(&mut self, node: usize, name: Option<&str>) -> anyhow::Result<&mut Service> {
        let wanted = |service: &&mut Service| {
            service.node == node && name.is_none_or(|name| service.name == name)
        };
        match self.services.iter_mut().find(wanted) {
            Some(service) => Ok(service),
            None => bail!(
                "node `{}` has no service `{}`",
                self.nodes[node].name,
                name.unwrap_or_default()
            ),
        }
    }

    fn describe(&self) -> Description {
        let services_of = |node| {
            let services = self
                .services
                .iter()
                .filter(move |service| service.node == node);
            services.map(|service| ServiceDescription {
                name: service.name.clone(),
                advertised: SocketAddr::V4(service.advertised),
                target: service.target,
            })
        };
        let nodes = self
            .nodes
            .iter()
            .enumerate()
            .map(|(index, node)| NodeDescription {
                name: node.name.clone(),
                address: node.address,
                services: services_of(index).collect(),
            });
        let paths = self.paths.iter().map(|((from, to), path)| PathDescription {
            from: self.nodes[*from].name.clone(),
            to: self.nodes[*to].name.clone(),
            pipes: path.pipes.clone(),
            shape: self.network.link_shape(path.link),
        });
        Description {
            nodes: nodes.collect(),
            pipes: self
                .pipes
                .iter()
                .map(|(name, (_, shape))| (name.clone(), shape.clone()))
                .collect(),
            paths: paths.collect(),
            socket_buffers: self.granted,
        }
    }

    fn count(&self) -> RelayCounters {
        let links = self
            .paths
            .iter()
            .map(|((from, to), path)| NamedLinkCounters {
                from: self.nodes[*from].name.clone(),
                to: self.nodes[*to].name.clone(),
                counters: self.network.link_counters(path.link).clone(),
            });
        let pipes = self
            .pipes
            .iter()
            .map(|(name, (id, _))| (name.clone(), self.network.pipe_counters(*id)));
        let service_addresses = self.services.iter().map(|service| service.advertised);
        let flow_addresses = self
            .flows
            .iter()
            .filter_map(|flow| local_v4(&flow.socket).ok());
        let addresses: HashSet<SocketAddrV4> = service_addresses.chain(flow_addresses).collect();
        RelayCounters {
            links: links.collect(),
            pipes: pipes.collect(),
            flows_open: self.flows.open(),
            flows_forgotten: self.flows.forgotten(),
            kernel_dropped_packets: self.kernel_drops_before + sockets::kernel_drops(&addresses),
            ..self.counters.clone()
        }
    }
}
