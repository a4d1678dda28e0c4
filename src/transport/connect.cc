#include "transport/connect.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>

#include "base/digest.h"
#include "transport/cipher.h"

namespace interlace {

namespace {

constexpr uint32_t kHelloMagic = 0x324d4c49;  // "ILM2"
// The kernel holds this much of what one rank sent and the other has not asked for yet, each way.
constexpr int kBufferBytes = 4 << 20;

struct Address {
  sockaddr_storage bytes{};
  socklen_t size = 0;

  int family() const { return bytes.ss_family; }
  void SetPort(uint16_t port) {
    if (family() == AF_INET6) {
      reinterpret_cast<sockaddr_in6*>(&bytes)->sin6_port = htons(port);
    } else {
      reinterpret_cast<sockaddr_in*>(&bytes)->sin_port = htons(port);
    }
  }
  std::string Text() const {
    char host[NI_MAXHOST] = {}, port[NI_MAXSERV] = {};
    getnameinfo(reinterpret_cast<const sockaddr*>(&bytes), size, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    return family() == AF_INET6 ? std::string("[") + host + "]:" + port : std::string(host) + ":" + port;
  }
};

Address AddressOf(const sockaddr* from) {
  Address address;
  address.size = from->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  std::memcpy(&address.bytes, from, address.size);
  return address;
}

Address Loopback() {
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return AddressOf(reinterpret_cast<const sockaddr*>(&loopback));
}

// What ranks tell one another through the group: where they are, and then where they listen.
struct Where {
  char host[64] = {};  // the boot of the machine and the network namespace
  int32_t encrypts = 0, shares_memory = 0;
  uint64_t processes = 0;  // the namespace in which they have numbers
};
struct Listener {
  uint32_t magic = kHelloMagic;
  Address address;
  uint8_t secret[16] = {};
};
// The first bytes of a connection.
struct Greeting {
  uint32_t magic = kHelloMagic;
  int32_t rank = 0;     // who connects
  int32_t control = 0;  // 1: the connection for notes
  uint8_t secret[16] = {};
  RingOffer rings;  // on the connection for data, where both are on one host; answered with a byte, 1: they are used
};

template <typename T>
Result<std::vector<T>> ExchangeAll(const RankGroup& group, const ExchangeBytes& exchange, const T& mine) {
  INTERLACE_ASSIGN(const std::vector<std::string> all,
                   exchange(std::string(reinterpret_cast<const char*>(&mine), sizeof mine)));
  std::vector<T> out(group.ranks.size());
  for (size_t i = 0; i < out.size(); ++i) {
    if (i >= all.size() || all[i].size() != sizeof(T))
      return MakeError("axis ", group.axis, ": rank ", i,
                       " did not tell where it is; do all ranks run the same release?");
    std::memcpy(&out[i], all[i].data(), sizeof(T));
  }
  return out;
}

// The key of the run, 32 bytes, or empty.
Result<std::string> KeyOfRun() {
  const char* given = std::getenv("INTERLACE_MESH_KEY");
  const std::string text = given == nullptr ? "" : given;
  if (text.find_first_not_of("0123456789abcdef") != std::string::npos || (!text.empty() && text.size() != 64))
    return MakeError("INTERLACE_MESH_KEY is no key: 64 hexadecimal digits");
  std::string key;
  for (size_t i = 0; i < text.size(); i += 2) key += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
  return key;
}

// Whether this rank is to encrypt. Error: it cannot.
Result<bool> Encrypts(const std::string& key) {
  const char* given = std::getenv("INTERLACE_ENCRYPT");
  const std::string text = given == nullptr ? "" : given;
  if (text.empty() || text == "0") return false;
  if (text != "1") return MakeError("INTERLACE_ENCRYPT is \"", text, "\"; it must be 1 or 0");
  if (key.empty())
    return MakeError("INTERLACE_ENCRYPT=1 needs the secret of the run; give every rank INTERLACE_SECRET_FILE");
  INTERLACE_TRY(FindCrypto());
  return true;
}

// Error: some ranks encrypt and some do not.
Status CheckAllAlike(const std::vector<Where>& places) {
  for (size_t rank = 1; rank < places.size(); ++rank) {
    const int32_t first = places[0].encrypts, other = places[rank].encrypts;
    if (first == other) continue;
    return MakeError("rank ", first ? 0 : rank, " encrypts (INTERLACE_ENCRYPT=1) and rank ", first ? rank : 0,
                     " does not; set it for all ranks or for none");
  }
  return Ok{};
}

template <typename T>
std::string BytesOf(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// With a key, what a listener learns instead of its own secret, which went over the network.
void Prove(const std::string& key, const Listener& listener, Greeting& greeting) {
  std::string proof(reinterpret_cast<const char*>(listener.secret), sizeof listener.secret);
  if (!key.empty()) proof = Hmac(key, "connect " + proof + BytesOf(greeting.rank) + BytesOf(greeting.control));
  std::memcpy(greeting.secret, proof.data(), sizeof greeting.secret);
}

// In a time that says nothing about where they differ.
bool SameSecret(const uint8_t* a, const uint8_t* b) {
  unsigned difference = 0;
  for (size_t i = 0; i < sizeof(Greeting::secret); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

// Of the frames from one rank to another.
std::string FrameKey(const std::string& key, const char* use, const std::vector<Listener>& all, int64_t from,
                     int64_t to) {
  const auto nonce = [&](int64_t rank) {
    return std::string(reinterpret_cast<const char*>(all[rank].secret), sizeof all[rank].secret);
  };
  return Hmac(key, use + nonce(from) + nonce(to) + BytesOf(from) + BytesOf(to));
}

void KeepAlive(SocketCalls& calls, int fd) {
  const int on = 1, first = 3, between = 1, times = 5, unanswered_ms = kDeadSeconds * 1000;
  calls.SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  calls.SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, &first, sizeof first);
  calls.SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof between);
  calls.SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
  calls.SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unanswered_ms, sizeof unanswered_ms);
}

Where WhereAmI() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat net {}, processes {};
  stat("/proc/self/ns/net", &net);
  stat("/proc/self/ns/pid", &processes);
  Where where;
  where.processes = processes.st_ino;
  std::strncpy(where.host, (boot + "/" + std::to_string(net.st_ino)).c_str(), sizeof(where.host) - 1);
  return where;
}

bool ShareMemory(const Where& a, const Where& b) {
  return a.shares_memory && b.shares_memory && std::strcmp(a.host, b.host) == 0 && a.processes == b.processes;
}

// The address of an interface: IPv4 when it has one.
Result<Address> AddressOfInterface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return MakeError("cannot list the network interfaces: ", std::strerror(errno));
  std::optional<Address> found;
  std::vector<std::string> names;
  for (const ifaddrs* at = list; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || (at->ifa_addr->sa_family != AF_INET && at->ifa_addr->sa_family != AF_INET6))
      continue;
    if (std::find(names.begin(), names.end(), at->ifa_name) == names.end()) names.emplace_back(at->ifa_name);
    if (name == at->ifa_name && (!found || (found->family() == AF_INET6 && at->ifa_addr->sa_family == AF_INET)))
      found = AddressOf(at->ifa_addr);
  }
  freeifaddrs(list);
  if (found) return *found;
  std::string all;
  for (const std::string& one : names) all += (all.empty() ? "" : ", ") + one;
  return MakeError("GLOO_SOCKET_IFNAME names the interface \"", name,
                   "\", which has no address here; there are: ", all);
}

// The first address of the host's own name that belongs to this host.
Result<Address> AddressOfHost() {
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  addrinfo wanted{}, *list = nullptr;
  wanted.ai_socktype = SOCK_STREAM;
  std::optional<Address> found;
  if (getaddrinfo(name, nullptr, &wanted, &list) == 0) {
    for (const addrinfo* at = list; at != nullptr && !found; at = at->ai_next) {
      if (at->ai_family != AF_INET && at->ai_family != AF_INET6) continue;
      const Socket probe(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (probe && bind(probe.fd(), at->ai_addr, at->ai_addrlen) == 0) found = AddressOf(at->ai_addr);
    }
    freeaddrinfo(list);
  }
  if (found) return *found;
  return MakeError("the name of this host, \"", name,
                   "\", stands for none of its own addresses; set GLOO_SOCKET_IFNAME to the interface to use");
}

Result<Address> ChooseAddress(const std::vector<Where>& places) {
  const char* given = std::getenv("GLOO_SOCKET_IFNAME");
  if (given != nullptr && *given != 0) {
    const std::string names = given;
    return AddressOfInterface(names.substr(0, names.find(',')));
  }
  const auto elsewhere = [&](const Where& where) { return std::strcmp(where.host, places[0].host) != 0; };
  if (std::none_of(places.begin(), places.end(), elsewhere)) return Loopback();
  return AddressOfHost();
}

// Options must be set before a connection is made: the window's scale is agreed on at its beginning. Where the system
// allows no large buffers, its own tuning does better than a fixed small one.
Socket MakeSocket(SocketCalls& calls, int family) {
  Socket made(calls.Open(family), calls);
  if (!made) return made;
  const int one = 1;
  calls.SetOption(made.fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  static const bool large = [family] {
    const Socket probe(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    int bytes = kBufferBytes;
    socklen_t size = sizeof bytes;
    setsockopt(probe.fd(), SOL_SOCKET, SO_SNDBUF, &bytes, size);
    return getsockopt(probe.fd(), SOL_SOCKET, SO_SNDBUF, &bytes, &size) == 0 && bytes >= kBufferBytes;
  }();
  if (large) {
    calls.SetOption(made.fd(), SOL_SOCKET, SO_SNDBUF, &kBufferBytes, sizeof kBufferBytes);
    calls.SetOption(made.fd(), SOL_SOCKET, SO_RCVBUF, &kBufferBytes, sizeof kBufferBytes);
  }
  return made;
}

int MillisecondsTo(SocketCalls& calls, int64_t deadline_ns) {
  return static_cast<int>(std::clamp<int64_t>((deadline_ns - calls.Nanos()) / 1'000'000, 0, 1 << 30));
}

// Connects and sends the greeting.
Result<Socket> ConnectTo(SocketCalls& calls, const Listener& listener, const Greeting& greeting, int64_t deadline_ns) {
  Socket made = MakeSocket(calls, listener.address.family());
  if (!made) return MakeError(std::strerror(errno));
  int error = 0;
  const auto* name = reinterpret_cast<const sockaddr*>(&listener.address.bytes);
  if (calls.Connect(made.fd(), name, listener.address.size) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      pollfd ready{made.fd(), POLLOUT, 0};
      socklen_t size = sizeof error;
      error = ETIMEDOUT;
      while (true) {
        const int count = calls.Poll(&ready, 1, MillisecondsTo(calls, deadline_ns));
        if (count < 0 && errno == EINTR) continue;
        if (count > 0) calls.GetOption(made.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
        break;
      }
    }
  }
  // A fresh connection's buffer takes the greeting at once.
  if (error == 0 && calls.SendBytes(made.fd(), &greeting, sizeof greeting, MSG_NOSIGNAL) != sizeof greeting)
    error = errno;
  if (error != 0) return MakeError(std::strerror(error));
  return made;
}

// Of a peer that was accepted: takes the rings that it offers, and says whether it did.
void AnswerOffer(SocketCalls& calls, const RingOffer& offer, PeerSockets& peer) {
  peer.rings = SharedRings::Open(offer);
  const char answer = peer.rings ? 1 : 0;  // the first byte that is sent here
  calls.SendBytes(peer.data.fd(), &answer, 1, MSG_NOSIGNAL);
}

// What a peer said to the rings that were offered to it, if there were any. Error: it has gone, or is silent.
Status HearAnswer(SocketCalls& calls, int64_t deadline_ns, PeerSockets& peer) {
  char answer = 0;
  while (true) {
    const ssize_t got = calls.ReceiveBytes(peer.data.fd(), &answer, 1, MSG_DONTWAIT);
    if (got == 1) break;
    if (got == 0) return MakeError("it closed the connection");
    if (errno != EAGAIN && errno != EINTR) return MakeError(std::strerror(errno));
    pollfd ready{peer.data.fd(), POLLIN, 0};
    if (errno == EAGAIN && calls.Poll(&ready, 1, MillisecondsTo(calls, deadline_ns)) == 0)
      return MakeError("it says nothing");
  }
  if (answer != 1) peer.rings.reset();
  if (peer.rings) peer.rings->WithdrawOffer();
  return Ok{};
}

// Accepts both connections of every higher rank. Strangers, and those that say nothing, are dropped.
Status AcceptPeers(SocketCalls& calls, const RankGroup& group, const Socket& listening, const Listener& mine,
                   const std::string& key, const std::vector<Where>& places, int64_t deadline_ns,
                   std::vector<PeerSockets>& peers) {
  struct Guest {
    Socket socket;
    Greeting greeting;
    size_t got = 0;
  };
  constexpr size_t kMostGuests = 256;
  std::vector<Guest> guests;
  int64_t missing = 2 * (group.size() - 1 - group.index);
  while (missing > 0) {
    std::vector<pollfd> ready{{listening.fd(), POLLIN, 0}};
    for (const Guest& guest : guests) ready.push_back({guest.socket.fd(), POLLIN, 0});
    const int count = calls.Poll(ready.data(), ready.size(), MillisecondsTo(calls, deadline_ns));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0 || calls.Nanos() > deadline_ns) {  // strangers that come without end do not put it off
      std::string names;
      for (int64_t rank = group.index + 1; rank < group.size(); ++rank) {
        if (!peers[rank].data || !peers[rank].control) names += (names.empty() ? "" : ", ") + std::to_string(rank);
      }
      return MakeError("rank ", names, " did not connect to rank ", group.index, " at ", mine.address.Text(),
                       " within the timeout; check the network between them, and GLOO_SOCKET_IFNAME");
    }
    for (size_t i = guests.size(); i-- > 0;) {
      if (ready[i + 1].revents == 0) continue;
      Guest& guest = guests[i];
      char* const place = reinterpret_cast<char*>(&guest.greeting) + guest.got;
      const ssize_t got =
          calls.ReceiveBytes(guest.socket.fd(), place, sizeof(Greeting) - guest.got, MSG_DONTWAIT);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      guest.got += got > 0 ? static_cast<size_t>(got) : 0;
      const Greeting& said = guest.greeting;
      const bool stranger = guest.got >= sizeof said.magic && said.magic != kHelloMagic;
      if (got > 0 && !stranger && guest.got < sizeof(Greeting)) continue;
      Greeting wanted = said;
      if (got > 0) Prove(key, mine, wanted);
      if (got > 0 && !stranger && said.rank > group.index && said.rank < group.size() &&
          SameSecret(said.secret, wanted.secret)) {
        Socket& place = said.control != 0 ? peers[said.rank].control : peers[said.rank].data;
        if (!place) {
          place = std::move(guest.socket);
          if (said.control == 0 && ShareMemory(places[said.rank], places[group.index]))
            AnswerOffer(calls, said.rings, peers[said.rank]);
          --missing;
        }
      }
      guests.erase(guests.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (ready[0].revents != 0) {
      Socket made(calls.Accept(listening.fd()), calls);
      if (!made) continue;
      const int one = 1;
      calls.SetOption(made.fd(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
      if (guests.size() >= kMostGuests) guests.erase(guests.begin());  // the one that was silent for longest
      guests.push_back({std::move(made), {}, 0});
    }
  }
  return Ok{};
}

}  // namespace

Result<std::vector<PeerSockets>> ConnectPeers(const RankGroup& group, const ExchangeBytes& exchange, double timeout_s,
                                              SocketCalls& calls, bool shares_memory) {
  const int64_t deadline_ns = calls.Nanos() + static_cast<int64_t>(timeout_s * 1e9);
  const auto failure = [&](const auto&... parts) { return MakeError("axis ", group.axis, ": ", parts...); };
  INTERLACE_ASSIGN(const std::string key, KeyOfRun());
  Where here = WhereAmI();
  INTERLACE_ASSIGN(const bool encrypts, Encrypts(key));
  here.encrypts = encrypts;
  here.shares_memory = shares_memory && !encrypts;  // what is encrypted is, on one host as well
  INTERLACE_ASSIGN(const std::vector<Where> places, ExchangeAll(group, exchange, here));
  if (Status alike = CheckAllAlike(places); !alike.ok()) return failure(alike.error().ToString());

  const uint64_t ring_bytes = SharedRings::RingBytes(
      std::count_if(places.begin(), places.end(), [&](const Where& where) { return ShareMemory(where, here); }) - 1);

  // A rank that cannot listen says so to the others with an empty address, instead of leaving them waiting.
  Listener mine;
  Socket listening;
  std::string trouble;
  if (Result<Address> address = ChooseAddress(places); !address.ok()) {
    trouble = address.error().ToString();
  } else {
    mine.address = *address;
    mine.address.SetPort(0);
    listening = MakeSocket(calls, mine.address.family());
    auto* name = reinterpret_cast<sockaddr*>(&mine.address.bytes);
    const int backlog = static_cast<int>(std::min<int64_t>(2 * group.size() + 16, 4096));
    if (!listening || calls.Bind(listening.fd(), name, mine.address.size) != 0 ||
        calls.Listen(listening.fd(), backlog) != 0 ||
        calls.NameOf(listening.fd(), name, &mine.address.size) != 0) {
      trouble = "cannot listen on " + mine.address.Text() + ": " + std::strerror(errno);
    } else if (getrandom(mine.secret, sizeof mine.secret, 0) != sizeof mine.secret) {
      trouble = std::string("no random numbers: ") + std::strerror(errno);
    }
  }
  if (!trouble.empty()) mine.magic = 0;
  INTERLACE_ASSIGN(const std::vector<Listener> all, ExchangeAll(group, exchange, mine));
  if (!trouble.empty()) return failure("rank ", group.index, ": ", trouble);
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    if (all[rank].magic != kHelloMagic || all[rank].address.size > sizeof(sockaddr_storage))
      return failure("rank ", rank, " has no address for its peers (its own error says why)");
  }
  // A key is new because this rank's own random number is in it, whatever others say.
  if (std::memcmp(all[group.index].secret, mine.secret, sizeof mine.secret) != 0)
    return failure("what rank ", group.index, " told the others came back changed; is somebody else on the network?");

  std::vector<PeerSockets> peers(group.size());
  for (int64_t rank = 0; rank < group.index; ++rank) {
    for (const bool control : {false, true}) {
      Greeting greeting;
      greeting.rank = static_cast<int32_t>(group.index);
      greeting.control = control;
      if (!control && ShareMemory(places[rank], here)) peers[rank].rings = SharedRings::Create(ring_bytes);
      if (!control && peers[rank].rings) greeting.rings = peers[rank].rings->offer();
      Prove(key, all[rank], greeting);
      Result<Socket> made = ConnectTo(calls, all[rank], greeting, deadline_ns);
      if (!made.ok()) {
        return failure("rank ", group.index, " cannot reach rank ", rank, " at ", all[rank].address.Text(), " (",
                       made.error().ToString(), "); check the network between them, and GLOO_SOCKET_IFNAME");
      }
      (control ? peers[rank].control : peers[rank].data) = std::move(*made);
    }
  }
  if (Status accepted = AcceptPeers(calls, group, listening, mine, key, places, deadline_ns, peers);
      !accepted.ok())
    return failure(accepted.error().ToString());
  for (int64_t rank = 0; rank < group.index; ++rank) {
    if (!ShareMemory(places[rank], here)) continue;
    if (Status heard = HearAnswer(calls, deadline_ns, peers[rank]); !heard.ok())
      return failure("rank ", rank, " was lost while the ranks connected: ", heard.error().ToString());
  }
  const bool several_hosts = std::any_of(
      places.begin(), places.end(), [&](const Where& where) { return std::strcmp(where.host, places[0].host) != 0; });
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    if (rank == group.index) continue;
    KeepAlive(calls, peers[rank].control.fd());
    if (key.empty() || (!several_hosts && !encrypts)) continue;
    const char* const use = encrypts ? "sealed frames " : "frames ";
    peers[rank].send_key = FrameKey(key, use, all, group.index, rank);
    peers[rank].receive_key = FrameKey(key, use, all, rank, group.index);
    peers[rank].encrypts = encrypts;
  }
  return peers;
}

}  // namespace interlace
