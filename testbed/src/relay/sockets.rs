//! UDP sockets with large buffers, and what the kernel dropped before they could be read.

use std::collections::HashSet;
use std::net::{SocketAddr, SocketAddrV4, UdpSocket};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};

/// Default buffers lose packets at a concurrency of 8; at this size none were lost.
const BUFFER_BYTES_WANTED: usize = 4 << 20;

/// The smallest buffers that any socket of the relay was granted, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketBuffers {
    /// What was asked for.
    pub wanted: usize,
    /// Receive buffer.
    pub receive: usize,
    /// Send buffer.
    pub send: usize,
}

impl SocketBuffers {
    pub(super) const WANTED: Self = Self {
        wanted: BUFFER_BYTES_WANTED,
        receive: BUFFER_BYTES_WANTED,
        send: BUFFER_BYTES_WANTED,
    };

    fn min(self, other: Self) -> Self {
        Self {
            wanted: self.wanted,
            receive: self.receive.min(other.receive),
            send: self.send.min(other.send),
        }
    }
}

/// Binds a non-blocking socket and lowers `granted` to the buffers it got.
pub(super) fn bind(
    address: SocketAddrV4,
    granted: &mut SocketBuffers,
) -> anyhow::Result<UdpSocket> {
    let open = || -> std::io::Result<(UdpSocket, SocketBuffers)> {
        let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
        socket.set_recv_buffer_size(BUFFER_BYTES_WANTED)?;
        socket.set_send_buffer_size(BUFFER_BYTES_WANTED)?;
        // Linux doubles what is asked for, for its own bookkeeping, and reports the double.
        let got = SocketBuffers {
            wanted: BUFFER_BYTES_WANTED,
            receive: socket.recv_buffer_size()? / 2,
            send: socket.send_buffer_size()? / 2,
        };
        socket.set_nonblocking(true)?;
        socket.bind(&SocketAddr::V4(address).into())?;
        Ok((socket.into(), got))
    };
    let (socket, got) = open().with_context(|| format!("cannot bind UDP {address}"))?;
    *granted = granted.min(got);
    Ok(socket)
}

/// Datagrams that the kernel dropped at the sockets bound to these addresses, as far as it says so.
pub(super) fn kernel_drops(addresses: &HashSet<SocketAddrV4>) -> u64 {
    let table = std::fs::read_to_string("/proc/self/net/udp").unwrap_or_default();
    table
        .lines()
        .skip(1)
        .filter_map(|line| drops_of(line, addresses))
        .sum()
}

/// The last column of a line of `/proc/net/udp`, if its local address is one of these.
fn drops_of(line: &str, addresses: &HashSet<SocketAddrV4>) -> Option<u64> {
    let mut fields = line.split_whitespace();
    let (ip, port) = fields.nth(1)?.split_once(':')?;
    let ip = u32::from_str_radix(ip, 16).ok()?.to_ne_bytes();
    let local = SocketAddrV4::new(ip.into(), u16::from_str_radix(port, 16).ok()?);
    if !addresses.contains(&local) {
        return None;
    }
    fields.last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_drops_are_read_from_the_right_line() {
        let mut granted = SocketBuffers::WANTED;
        let socket = bind("127.0.0.1:0".parse().unwrap(), &mut granted).unwrap();
        let SocketAddr::V4(address) = socket.local_addr().unwrap() else {
            panic!("an IPv4 address")
        };
        let table = std::fs::read_to_string("/proc/self/net/udp").unwrap();
        let lines: Vec<_> = table
            .lines()
            .filter_map(|line| drops_of(line, &HashSet::from([address])))
            .collect();
        assert_eq!(lines, [0]);
    }

    #[test]
    fn a_flood_of_an_unread_socket_shows_as_kernel_drops() {
        let mut granted = SocketBuffers::WANTED;
        let socket = bind("127.0.0.1:0".parse().unwrap(), &mut granted).unwrap();
        socket2::SockRef::from(&socket)
            .set_recv_buffer_size(4_096)
            .unwrap();
        let SocketAddr::V4(address) = socket.local_addr().unwrap() else {
            panic!("an IPv4 address")
        };
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for _ in 0..100 {
            sender.send_to(&[0; 1_000], address).unwrap();
        }
        assert!(kernel_drops(&HashSet::from([address])) > 50);
    }
}
