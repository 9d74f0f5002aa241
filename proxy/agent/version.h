// What an agent says of its release.
#pragma once

namespace dxpu::agent {

inline constexpr char kSoftwareVersion[] = DXPU_VERSION;

}  // namespace dxpu::agent
